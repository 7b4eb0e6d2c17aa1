"""Rounds with the shards of this machine: through memory that they lend.

A worker writes what it contributes into a room of its own at the shard, and reads the mean where
the shard has it. So an exchange copies `x` there and the mean back, and the shard copies nothing.
A room that may still be read by a round that we have given up is not used again.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from springline.center import lent
from springline.center.layout import ALIGNMENT, Bytes
from springline.center.lent import Address, borrow
from springline.center.served import near
from springline.center.served.messages import Message, Sender
from springline.center.served.parts import Parts
from springline.center.served.peer import Call

if TYPE_CHECKING:
    from springline.center.served.member import ServedMember

# What is written first is seen first, which only those need who look while it is written.
_ORDERED = platform.machine() in ("x86_64", "AMD64")
_PAUSE = 2e-4  # seconds between two looks for the next piece
_LOOK = 0.2  # seconds without one after which we look what became of the call
MARKS = 16  # bytes behind memory that is lent: the last round it is of; a center's pieces of it


@dataclass(frozen=True)
class Offer:
    """What a shard lends to a worker.

    Args:
        room: for what it contributes, and its marks.
        center: the center, and its marks.
    """

    room: Address
    center: Address


class _Room:
    """A shard's offer, at hand."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.mine, self.written = split(borrow(offer.room, populate=True))
        self.center, self.marks = split(borrow(offer.center, populate=True))


class Rooms:
    """The rooms of one worker.

    Args:
        member: the worker's place.
        sizes: of each shard, in bytes.
    """

    def __init__(self, member: ServedMember, sizes: list[int]) -> None:
        self._member = member
        large = {k for k, size in enumerate(sizes) if size > near.SMALL}
        self._fits = large if lent.POSSIBLE else set()
        self.near = set(self._fits)  # which may be here
        self._rooms: dict[int, _Room] = {}

    def look_again(self, shard: int) -> None:
        """Take it that a shard that was started again may be here now."""
        self._rooms.pop(shard, None)
        self.near |= self._fits & {shard}

    def forget(self) -> None:
        """Use these rooms no more: somebody may still read them."""
        self._rooms.clear()

    def contribute(self, parts: Parts, message: Message, number: int) -> None:
        """Write what is sent to those shards that are here; they look when they need it.

        Raises:
            NonFiniteError: it is not finite.
        """
        self._enter(self.near - self._rooms.keys(), message.sender)
        for room in self._rooms.values():
            room.written[0] = 0
        problems: dict[int, BaseException] = {}
        # One thread alone does not use all of the memory's bandwidth.
        other = threading.Thread(target=self._write, args=(parts, 1, problems))
        try:
            other.start()
        except RuntimeError:  # from Python 3.12 on, when the interpreter is about to end
            other.run()
        self._write(parts, 0, problems)
        if other.is_alive():
            other.join()
        if problems:
            raise problems[min(problems)]
        for room in self._rooms.values():
            room.written[0] = number

    def _write(self, parts: Parts, half: int, problems: dict[int, BaseException]) -> None:
        try:
            with np.errstate(over="raise", invalid="raise", divide="raise"):  # in every thread
                for k, room in self._rooms.items():
                    middle = len(parts.pieces[k]) // 2
                    pieces = slice(middle, None) if half else slice(middle)
                    parts.write_x(k, room.mine, pieces)
        except BaseException as error:
            problems[half] = error

    def contributed(self, shard: int) -> Bytes:
        """Return what was written for a shard."""
        return self._rooms[shard].mine

    def follow(self, parts: Parts, calls: Mapping[int, Call], number: int) -> dict[int, int]:
        """Adopt pieces of a round's mean while shards make the others, until their calls end.

        Returns:
            How many, of each shard.
        """
        pieces = {k: len(parts.pieces[k]) for k in calls if k in self._rooms and _ORDERED}
        adopted = dict.fromkeys(calls, 0)
        looked = time.monotonic()
        while pieces:
            before = sum(adopted.values())
            for k, room in ((k, self._rooms[k]) for k in pieces):
                which, made = room.marks.tolist()
                if which == number and made > adopted[k]:
                    parts.adopt_mean(k, room.center, slice(adopted[k], made))
                    adopted[k] = made
                    calls[k].heard()
                elif which != number:  # it begins anew, or has not begun
                    adopted[k] = 0
            pieces = {k: n for k, n in pieces.items() if adopted[k] < n}
            if sum(adopted.values()) > before:
                looked = time.monotonic()
            elif time.monotonic() - looked > _LOOK:
                pieces = {k: n for k, n in pieces.items() if not calls[k].look(0)}
                looked = time.monotonic()
            else:
                time.sleep(_PAUSE)
        return adopted

    def adopt(self, parts: Parts, shard: int, after: int, token: str, last: int) -> bool:
        """Adopt what is left of a mean; whether it was there, and whole.

        Args:
            parts: of the worker.
            shard: whose.
            after: so many pieces.
            token: of the memory in which the mean is.
            last: the round that it is of now.
        """
        room = self._rooms[shard]
        if room.offer.center.token != token:
            return False
        parts.adopt_mean(shard, room.center, slice(after, None))
        return bool(room.marks[0] == last)

    def _enter(self, shards: set[int], sender: Sender) -> None:
        """Ask shards for rooms; those that are elsewhere are not near any more."""
        with contextlib.suppress(OSError):
            where = lent.machine()
            calls = {k: self._member.ask(k, "lend", sender, where) for k in shards}
            for k, call in calls.items():
                offer: Offer | None = call.result()
                if offer:
                    with contextlib.suppress(OSError):
                        self._rooms[k] = _Room(offer)
        self.near -= shards - self._rooms.keys()


def split(memory: Bytes) -> tuple[Bytes, NDArray[Any]]:
    """Return the center and the marks in memory that is lent."""
    return memory[:-MARKS], memory[-MARKS:].view(np.int64)


def size_with_marks(size: int) -> int:
    """Return how much memory to lend for a center and its marks."""
    return -(-size // ALIGNMENT) * ALIGNMENT + MARKS
