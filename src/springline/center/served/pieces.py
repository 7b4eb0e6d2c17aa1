"""The pieces in which a part goes through memory: whole blocks, as many as a slot holds."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from springline.center.layout import Bytes, Run
from springline.center.served import near

_MOST = 253  # blocks of a piece: an answer is a byte, and says how many were applied, or `AGAIN`


@dataclass(frozen=True)
class Piece:
    """Blocks that go into a slot together.

    Args:
        blocks: which of the part's.
        runs: these blocks.
        place: their bytes in the part.
    """

    blocks: slice
    runs: Sequence[Run]
    place: slice

    def elements(self, slot: Bytes) -> Iterator[NDArray[Any]]:
        """Return each block's elements in a slot."""
        for run in self.runs:
            at = run.start - self.runs[0].start
            yield slot[at : at + run.stop - run.start].view(run.dtype)


def pieces(runs: Sequence[Run]) -> list[Piece]:
    """Cut the blocks of a part into pieces."""
    found: list[Piece] = []
    start = 0
    for k in range(1, len(runs) + 1):
        if k in (len(runs), start + _MOST) or runs[k].stop - runs[start].start > near.SLOT:
            place = slice(runs[start].start - runs[0].start, runs[k - 1].stop - runs[0].start)
            found.append(Piece(slice(start, k), runs[start:k], place))
            start = k
    return found


def slot_for(pieces: Sequence[Piece]) -> int:
    """Return how long a slot must be: any piece fits, and each begins a page."""
    longest: int = max(piece.place.stop - piece.place.start for piece in pieces)
    return -(-longest // mmap.PAGESIZE) * mmap.PAGESIZE


def first_block(pieces: Sequence[Piece], after: int) -> int:
    """Return the number of the first block after so many pieces."""
    return pieces[after - 1].blocks.stop if after else 0
