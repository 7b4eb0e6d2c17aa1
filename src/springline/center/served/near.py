"""Memory that a worker lends to a shard on the same machine: slots, and a pipe in either direction.

The shard finds the pipes under `/proc`, as it does the memory. They have no names either, so that
nothing is left behind, whoever is killed. The shard is called to the first exchange, and stays. As
often as an exchange has pieces it is told by a byte that the next slot is filled; what it is told
after that is the request of the next exchange.
"""

from __future__ import annotations

import json
import os
import select
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from springline.center import lent
from springline.center.layout import Bytes
from springline.center.lent import Lent, open_of
from springline.center.served.messages import Message, Sender

if sys.platform != "win32":
    import fcntl

SLOT = 2 * 1024 * 1024  # bytes: eight blocks, which stay in cache on their way there and back
LARGEST = 8 * SLOT  # of a slot, where a block is a whole parameter
SLOTS = 4  # pieces that may be under way at once
SMALL = 2 * SLOT  # bytes of a part that is sent as a message, wherever the shard is
# Answers other than the number of blocks that were applied; the slot then holds the center now.
AGAIN = 255  # it was applied before
REFUSED = 254  # it was refused before
_END = b"\0"  # of what is JSON in a request
_COUNT = 4  # bytes in which a pipe is told how long a request is
_AWAY = 0.5  # seconds without a piece after which we look whether the worker is still there
POSSIBLE = lent.POSSIBLE and hasattr(select, "poll")


class LeftError(Exception):
    """The worker that has lent the memory does not want anything any more."""


@dataclass(frozen=True)
class Address:
    """Where a shard finds a worker's memory and pipes.

    Args:
        memory: that of the slots.
        there: descriptor and inode of the pipe to the shard.
        back: descriptor and inode of the pipe to the worker.
    """

    memory: lent.Address
    there: tuple[int, int]
    back: tuple[int, int]


@dataclass(frozen=True)
class Request:
    """How an exchange begins; on its way it is bytes, which Ray takes half the time to send.

    Args:
        message: all but its data.
        before: whether the worker wants to know `c` as it was, beside what it adopts.
        address: of the memory through which the data comes.
    """

    message: Message
    before: bool
    address: Address

    def pack(self) -> bytes:
        """Return what `unpack` takes."""
        message, memory = self.message, self.address.memory
        fields = (
            list(vars(message.sender).values()),
            (message.gradients, message.had, self.before),
            list(vars(memory).values()),
            (self.address.there, self.address.back),
        )
        rates = message.rates.tobytes()
        return json.dumps(fields).encode() + _END + rates + message.seen.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        """Return the request that was packed."""
        fields, _, others = data.partition(_END)
        sender, (gradients, had, before), memory, (there, back) = json.loads(fields)
        count = len(others) // 9  # a float64 and a bool per entry
        rates = np.frombuffer(others, np.float64, count)
        seen = np.frombuffer(others, np.bool_, count, 8 * count)
        nothing = np.empty(0, np.uint8)
        message = Message(Sender(*sender), nothing, gradients, seen, rates, had)
        return cls(message, before, Address(lent.Address(*memory), tuple(there), tuple(back)))


class Ring:
    """The worker's side.

    Args:
        slot: bytes of each slot.

    Raises:
        OSError: there are no more files, or no memory.
    """

    def __init__(self, slot: int = SLOT) -> None:
        self._ends: list[int] = []  # the shard reads the first, we write the second; and so back
        weakref.finalize(self, _close, self._ends)
        self._lent = Lent(SLOTS * slot)
        self.slots = _slots(self._lent.memory)

    def open(self) -> None:
        """Make pipes."""
        self.hang_up()
        for _ in range(2):
            self._ends += os.pipe()

    @property
    def address(self) -> Address:
        """Where a shard finds all this."""
        reads, _, _, writes = self._ends
        there, back = ((end, os.fstat(end).st_ino) for end in (reads, writes))
        return Address(self._lent.address, there, back)

    def ask(self, packed: bytes) -> bool:
        """Tell a shard that is here of another exchange, if its request goes into a pipe.

        The pipe is empty: the shard has answered to all that it was told before. If it reads no
        more, also what we say of slots has to go in: who writes to a full pipe waits for ever.
        """
        data = len(packed).to_bytes(_COUNT, "little") + packed
        fits = len(data) + SLOTS <= fcntl.fcntl(self._ends[1], fcntl.F_GETPIPE_SZ)
        if fits:
            os.write(self._ends[1], data)
        return fits

    def say(self) -> None:
        """Tell that the next slot is filled."""
        os.write(self._ends[1], b"\0")

    def fileno(self) -> int:
        """Return what is readable when there is an answer."""
        return self._ends[2]

    def hear(self) -> bytes:
        """Return the answers that are there, a byte for each slot; wait for the first."""
        return os.read(self._ends[2], SLOTS)

    def hang_up(self) -> None:
        """Let go of the pipes; whoever reads from them is told."""
        _close(self._ends)

    def close(self) -> None:
        """Let go of everything. A shard may still write to the memory; nobody sees it."""
        self.hang_up()
        self.slots = []
        self._lent.close()


class Guest:
    """The shard's side, to be used in a `with`.

    Args:
        address: the worker's.
        memory: that of the slots, as it is borrowed.

    Raises:
        OSError: the worker cannot be reached like this.
    """

    def __init__(self, address: Address, memory: Bytes) -> None:
        self._process = address.memory.process
        self._there = address.there
        self._ends: list[int] = []
        self.slots = _slots(memory)
        self._poll = select.poll()
        try:
            self._hears = self._open(*address.there, os.O_RDONLY)
            self._poll.register(self._hears, select.POLLIN)
            self._says = self._open(*address.back, os.O_WRONLY)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._ends)

    def wait(self, check: Callable[[], object]) -> None:
        """Wait until another slot is filled.

        Args:
            check: is called now and then, and may raise.

        Raises:
            LeftError: none will be.
        """
        self._hear(1, check)

    def next(self, check: Callable[[], object]) -> Request:
        """Wait for another exchange; as `wait`."""
        count = int.from_bytes(self._hear(_COUNT, check), "little")
        return Request.unpack(self._hear(count, check))

    def _hear(self, count: int, check: Callable[[], object]) -> bytes:
        heard = b""
        while len(heard) < count:
            while not self._poll.poll(_AWAY * 1000):
                if not self._is_there():
                    raise LeftError
                check()
            more = os.read(self._hears, count - len(heard))
            if not more:
                raise LeftError
            heard += more
        return heard

    def _is_there(self) -> bool:
        """Whether the worker still has its pipe, which a child of it may hold when it is gone."""
        end, inode = self._there
        try:
            return Path(f"/proc/{self._process}/fd/{end}").stat().st_ino == inode
        except OSError:
            return False

    def say(self, answer: int) -> None:
        """Answer for a slot."""
        try:
            os.write(self._says, bytes([answer]))
        except BrokenPipeError as error:
            raise LeftError from error

    def _open(self, number: int, inode: int, how: int) -> int:
        end = open_of(self._process, number, how)
        self._ends.append(end)
        if os.fstat(end).st_ino != inode:
            raise OSError("the worker has gone on")
        return end


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _slots(memory: Bytes) -> list[Bytes]:
    slot = len(memory) // SLOTS
    return [memory[k * slot : (k + 1) * slot] for k in range(SLOTS)]
