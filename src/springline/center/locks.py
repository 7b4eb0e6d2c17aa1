"""Locks that a killed process cannot keep: by thread in one process, by record among many.

A lock is a number. Shards, ranks and the few others have ranges of their own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from springline.center.waiting import describe_process, describe_rank, wait_until
from springline.errors import CenterError
from springline.signals import deferred

if sys.platform != "win32":  # `SharedCenter` refuses it before it gets here
    import fcntl

CREATE, ROUND, CHECKPOINT, KEEPER = range(4)
SHARD, RANK = 1 << 6, 1 << 12
_FLOCK = struct.Struct("hhqqi4x")  # Linux, 64 bit
_NAMES = {
    CREATE: "the center, which is being made or joined",
    ROUND: "the list of the round",
    CHECKPOINT: "the checkpoint that is being written",
}


class Locks(ABC):
    """Exclusive locks between the threads and processes that share a center.

    They are polled, never waited for in the kernel: a wait can then name the holder, time out and
    be interrupted by Ctrl-C.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._ours: set[int] = set()

    @contextlib.contextmanager
    def acquire(self, number: int, timeout: float | None = None) -> Iterator[None]:
        """Wait for a lock and hold it inside the `with`; no signal handler runs meanwhile.

        Raises:
            RoundTimeoutError: others have kept it for longer than `timeout` seconds.
        """
        with deferred():
            if not self.try_acquire(number):
                what = _NAMES.get(number) or f"part {number - SHARD} of the center"
                wait_until(
                    lambda: self.try_acquire(number), lambda: [self.who(number)], timeout, what
                )
            try:
                yield
            finally:
                self.release(number)

    def try_acquire(self, number: int) -> bool:
        """Acquire a lock if it is free."""
        with deferred(), self._guard:
            if number in self._ours or not self._try_acquire_elsewhere(number):
                return False
            self._ours.add(number)
            return True

    def release(self, number: int) -> None:
        """Release a lock."""
        with deferred(), self._guard:
            self._release_elsewhere(number)
            self._ours.discard(number)

    def held(self, number: int) -> bool:
        """Whether any process, this one included, holds a lock. Never acquires it."""
        return number in self._ours or self.held_elsewhere(number)

    def holder(self, number: int) -> int | None:
        """Return the process that holds a lock, as far as that is known."""
        return os.getpid() if number in self._ours else None

    def who(self, number: int) -> str:
        """Return who holds a lock, as far as that is known, and what it is doing."""
        process = self.holder(number)
        if process in (None, os.getpid()):
            return "another thread of this process" if process else "no process any more"
        return self._name(process)

    def _name(self, process: int) -> str:
        return describe_process(process)

    @abstractmethod
    def _try_acquire_elsewhere(self, number: int) -> bool: ...

    @abstractmethod
    def _release_elsewhere(self, number: int) -> None: ...

    @abstractmethod
    def held_elsewhere(self, number: int) -> bool:
        """Whether another holds a lock: another process, or another user of the file in ours."""


class ThreadLocks(Locks):
    """Locks between the threads of one process."""

    def _try_acquire_elsewhere(self, number: int) -> bool:
        return True

    def _release_elsewhere(self, number: int) -> None:
        """Nobody else knows of it."""

    def held_elsewhere(self, number: int) -> bool:
        """Nobody else knows of it."""
        return False


class RecordLocks(Locks):
    """Record locks on the bytes of a file, which the kernel releases when their process dies.

    They belong to the open file (OFD locks), not to the process: other readers of the file, in
    this process too, take nothing from them. What a process forks would keep them alive, so a
    forked child closes its copy before it does anything else; what is started by `exec` has none.

    A lock's holder writes its process id into the file, so that others can name what they wait for;
    a shard's, which is locked in every exchange, into `holders`.
    """

    _all: ClassVar[weakref.WeakSet[RecordLocks]] = weakref.WeakSet()
    _ID: ClassVar[struct.Struct] = struct.Struct("q")

    def __init__(self, path: Path) -> None:
        super().__init__()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        self.holders: NDArray[np.int64] | None = None  # of the shards, in the center's memory
        self._all.add(self)

    def close(self) -> None:
        """Give up all locks, and the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def held_elsewhere(self, number: int) -> bool:
        """Whether another process holds a lock, or another user of the file in this one."""
        return bool(self._ask(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, number) != fcntl.F_UNLCK)

    def holder(self, number: int) -> int | None:
        """Return the process that holds a lock, as far as that is known."""
        return self.last_holder(number) if self.held(number) else None

    def last_holder(self, number: int) -> int | None:
        """Return the process that holds a lock, or has held it last."""
        if self.holders is not None and SHARD <= number < RANK:
            return int(self.holders[number - SHARD]) or None
        text = os.pread(self._fd, self._ID.size, self._ID.size * number)
        return int(self._ID.unpack(text)[0]) if len(text) == self._ID.size else None

    def _name(self, process: int) -> str:
        ranks = os.fstat(self._fd).st_size // self._ID.size - RANK
        rank = next((r for r in range(ranks) if self.holder(RANK + r) == process), None)
        return describe_process(process) if rank is None else describe_rank(rank, process)

    def _try_acquire_elsewhere(self, number: int) -> bool:
        try:
            self._ask(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, number)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise CenterError(
                f"The file system refused a record lock ({error.strerror}). Put the run "
                "on a local file system, or mount this one with locking."
            ) from error
        if self.holders is not None and SHARD <= number < RANK:
            self.holders[number - SHARD] = os.getpid()
            return True
        with contextlib.suppress(OSError):  # a full disk: others cannot name the holder
            os.pwrite(self._fd, self._ID.pack(os.getpid()), self._ID.size * number)
        return True

    def _release_elsewhere(self, number: int) -> None:
        self._ask(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number)

    def _ask(self, command: int, kind: int, number: int) -> int:
        return record_lock(self._fd, command, kind, number)


def record_lock(fd: int, command: int, kind: int, number: int = 0) -> int:
    """Ask the kernel for an OFD lock on one byte of a file, or about it; return the answer's kind.

    Raises:
        BlockingIOError: others hold it.
    """
    question = _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(fd, command, question))[0])


def _close_in_child() -> None:
    for locks in list(RecordLocks._all):
        locks.close()
    RecordLocks._all.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
