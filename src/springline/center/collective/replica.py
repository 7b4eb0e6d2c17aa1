"""The center on one machine: `c`, and the buffer in which all ranks add up the next one.

For each dtype there are two flat buffers. One holds `c`. In the other all that the ranks contribute
is added up, and the sum *is* the next `c`: the two change places, and nothing is copied. Before the
elements stands a table with a row per rank, which is added up with them: every rank writes its own
row and zeros elsewhere.

Both are in the memory of the machine's first rank, its speaker, which writes what it contributes
into the buffer of the sum. Each of the others has a buffer of its own for that, and all of them add
these to the sum, each in its share of the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from springline.center.layout import ALIGNMENT, BLOCK, Bytes, Layout, Run

Array = NDArray[Any]
# Columns of the table. A float32 counts to 2²⁴ only, so that steps are in two.
CONTRIBUTES, FINISHED, LARGE, SECONDS, STEPS, STEPS_HIGH = range(6)
COLUMNS = 6
_LOW = 1 << 20


@dataclass(frozen=True)
class Row:
    """What a rank says of itself in a round."""

    contributes: bool
    finished: bool
    large: bool  # its contribution may make the sum overflow
    seconds: float  # spent exchanging
    steps: int


@dataclass(frozen=True)
class Part:
    """A block, and where its elements are in the buffers of its dtype."""

    run: Run
    kind: int  # index of the dtype
    place: slice


class Replica:
    """Both buffers, for each dtype; there is nothing in them before `settle`.

    Args:
        layout: the model's.
        ranks: how many.
    """

    def __init__(self, layout: Layout, ranks: int) -> None:
        self.layout = layout
        shards = list(layout.shards(whole=False))
        self.dtypes = sorted({shard.dtype for shard in shards}) or ["float32"]
        self._ranks = ranks
        first = np.dtype(self.dtypes[0]).itemsize
        head = -(-ranks * COLUMNS * first // ALIGNMENT) * ALIGNMENT // first
        sizes = [head] + [0] * (len(self.dtypes) - 1)
        self.parts: list[Part] = []
        for shard in shards:
            kind, item = self.dtypes.index(shard.dtype), np.dtype(shard.dtype).itemsize
            for run in layout.blocks(shard, whole=False, elementwise=True):
                start = sizes[kind] + (run.start - shard.start) // item
                place = slice(start, start + (run.stop - run.start) // item)
                self.parts.append(Part(run, kind, place))
            sizes[kind] += -(-(shard.stop - shard.start) // ALIGNMENT) * ALIGNMENT // item
        self._sizes = sizes
        self.now = 0  # which of the two is `c`

    @property
    def nbytes(self) -> int:
        """Of one of the two, with all dtypes."""
        kinds = zip(self.dtypes, self._sizes, strict=True)
        return sum(size * np.dtype(dtype).itemsize for dtype, size in kinds)

    def settle(self, rooms: Sequence[Bytes], place: int, device: torch.device) -> None:
        """Take the memory.

        Args:
            rooms: that of each rank on this machine: two buffers of the first, one of the others.
            place: which of them is this rank's.
            device: where tensors must be to be sent; the buffers themselves are on the CPU.
        """
        self.buffers = [self._cut(rooms[0][k * self.nbytes :]) for k in (0, 1)]
        self._mates = [self._cut(room) for room in rooms[1:]]
        # Where this rank's contribution goes, whichever of the two is to be the sum.
        self.messages = [self._mates[place - 1]] * 2 if place else self.buffers
        self._place, self._count = place, len(rooms)
        self._share = list(self._cut_share()) if self._mates else []
        self._tensors = [[torch.from_numpy(b) for b in both] for both in self.buffers]
        self._staged = [t.to(device) for t in self._tensors[0]] if device.type != "cpu" else []

    def _cut(self, room: Bytes) -> list[Array]:
        """Return the buffers of each dtype."""
        start, found = 0, list[Array]()
        for dtype, size in zip(self.dtypes, self._sizes, strict=True):
            stop = start + size * np.dtype(dtype).itemsize
            found.append(room[start:stop].view(dtype))
            start = stop
        return found

    def _cut_share(self) -> Iterator[tuple[int, slice]]:
        """Yield which elements this rank adds up, by dtype, in pieces that stay in cache."""
        for kind, (dtype, size) in enumerate(zip(self.dtypes, self._sizes, strict=True)):
            item = np.dtype(dtype).itemsize
            line = ALIGNMENT // item  # no two ranks write to the same
            low, high = (size // line * (self._place + k) // self._count * line for k in (0, 1))
            for start in range(low, high, BLOCK // item):
                yield kind, slice(start, min(start + BLOCK // item, high))

    @property
    def next(self) -> int:
        """Which of the two the next `c` comes to be in."""
        return 1 - self.now

    def center(self, out: Bytes) -> None:
        """Copy `c` into a flat buffer."""
        for part in self.parts:
            np.copyto(part.run.view(out), self.buffers[self.now][part.kind][part.place])

    def write(self, values: Bytes) -> None:
        """Set `c` from a flat buffer."""
        for part in self.parts:
            np.copyto(self.buffers[self.now][part.kind][part.place], part.run.view(values))

    def add(self) -> None:
        """Add up this rank's share of what the machine's ranks contribute, in their order."""
        with np.errstate(over="ignore"):  # it is large then, and all look at the sum
            for kind, place in self._share:
                total = self.buffers[self.next][kind][place]
                for message in self._mates:
                    np.add(total, message[kind][place], out=total)

    def outgoing(self) -> list[Tensor]:
        """Return what is to be added up, where it can be sent."""
        tensors = self._tensors[self.next]
        for staged, tensor in zip(self._staged, tensors, strict=False):
            staged.copy_(tensor)
        return self._staged or tensors

    def incoming(self) -> None:
        """Take the sums back."""
        for tensor, staged in zip(self._tensors[self.next], self._staged, strict=False):
            tensor.copy_(staged)

    def say(self, rank: int, row: Row) -> None:
        """Write this rank's row into what is to be added up."""
        table = self._table(self.messages)
        table[:] = 0
        high, low = divmod(row.steps, _LOW)
        table[rank] = row.contributes, row.finished, row.large, row.seconds, low, high

    def said(self) -> list[Row]:
        """Read all ranks' rows out of the sum."""

        def rows() -> Iterator[Row]:
            for row in self._table(self.buffers).tolist():
                steps = int(row[STEPS]) + _LOW * int(row[STEPS_HIGH])
                flags = (bool(row[CONTRIBUTES]), bool(row[FINISHED]), bool(row[LARGE]))
                yield Row(*flags, seconds=row[SECONDS], steps=steps)

        return list(rows())

    def scale(self, factor: float) -> None:
        """Multiply the sum, this rank some of its blocks; see `overflown`."""
        with np.errstate(over="ignore"):
            for part in self.parts[self._place :: self._count]:
                block = self.buffers[self.next][part.kind][part.place]
                np.multiply(block, factor, out=block)

    def overflown(self) -> str | None:
        """Return the name of a tensor of the sum that is not finite."""
        for part in self.parts:
            block = self.buffers[self.next][part.kind][part.place]
            finite = np.isfinite(block)
            if not finite.all():
                return self.layout.name_at(part.run.start + int(np.argmin(finite)) * block.itemsize)
        return None

    def _table(self, buffers: Sequence[Sequence[Array]]) -> Array:
        return buffers[self.next][0][: self._ranks * COLUMNS].reshape(self._ranks, COLUMNS)
