"""Locks that a killed process cannot keep: by thread in one process, by record among many.

A lock is a number. Shards, ranks and the few others have ranges of their own.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from springline.center.errors import CenterError

if sys.platform != "win32":  # `SharedCenter` says so before it gets here
    import fcntl

CREATE, ROUND, CHECKPOINT, KEEPER = 0, 1, 2, 3
SHARD, RANK = 1 << 20, 1 << 30


class Locks(ABC):
    """Exclusive locks between the threads and processes that share a center."""

    def __init__(self) -> None:
        self._threads: dict[int, threading.Lock] = {}
        self._ours: set[int] = set()

    @contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Wait for a lock and hold it."""
        self._acquire(number, block=True)
        try:
            yield
        finally:
            self.release(number)

    def take(self, number: int) -> bool:
        """Take a lock if it is free."""
        return self._acquire(number, block=False)

    def release(self, number: int) -> None:
        """Give a lock back."""
        self._ours.discard(number)
        self._give_back(number)
        self._threads[number].release()

    def held(self, number: int) -> bool:
        """Whether anybody, this process included, holds a lock. Never takes it."""
        return number in self._ours or self.held_elsewhere(number)

    def _acquire(self, number: int, block: bool) -> bool:
        thread = self._threads.get(number) or self._threads.setdefault(number, threading.Lock())
        if not thread.acquire(blocking=block):
            return False
        try:
            taken = self._take_from_others(number, block)
        except BaseException:
            thread.release()
            raise
        if taken:
            self._ours.add(number)
        else:
            thread.release()
        return taken

    @abstractmethod
    def _take_from_others(self, number: int, block: bool) -> bool: ...

    @abstractmethod
    def _give_back(self, number: int) -> None: ...

    @abstractmethod
    def held_elsewhere(self, number: int) -> bool:
        """Whether another process holds a lock."""


class ThreadLocks(Locks):
    """Locks between the threads of one process."""

    def _take_from_others(self, number: int, block: bool) -> bool:
        return True

    def _give_back(self, number: int) -> None:
        """Nobody else knows of it."""

    def held_elsewhere(self, number: int) -> bool:
        """Nobody else knows of it."""
        return False


class RecordLocks(Locks):
    """Record locks on the bytes of a file.

    The kernel releases them at once when their process dies, whatever children it had forked.
    Their two traps: threads of one process do not exclude each other (so there is a thread lock
    too), and closing *any* descriptor of the file drops them all (so a process has one object and
    one descriptor per file, closed when its last user is gone).
    """

    _open: ClassVar[dict[tuple[int, int], RecordLocks]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()
    _FLOCK: ClassVar[struct.Struct] = struct.Struct("hhqqi4x")  # Linux, 64 bit

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._users = 0

    @classmethod
    def of(cls, path: Path) -> RecordLocks:
        """Return this process's locks on the file `path`, which is made if need be."""
        with cls._guard:
            try:
                status = path.stat()
                known = cls._open.get((status.st_dev, status.st_ino))
            except FileNotFoundError:
                known = None
            if known is None:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                status = os.fstat(fd)
                known = cls._open.setdefault((status.st_dev, status.st_ino), cls(fd))
            known._users += 1
            return known

    def close(self) -> None:
        """Give up one use of the file; the last one closes it."""
        with self._guard:
            self._users -= 1
            if self._users == 0:
                for key in [key for key, locks in self._open.items() if locks is self]:
                    del self._open[key]  # a forked child has none
                os.close(self._fd)

    def _take_from_others(self, number: int, block: bool) -> bool:
        mode = fcntl.LOCK_EX if block else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            try:
                fcntl.lockf(self._fd, mode, 1, number)
            except OSError as error:
                if error.errno == errno.EDEADLK:
                    # The kernel thinks in processes: two threads here and two there, each holding
                    # one lock and waiting for another, look like a deadlock and are none.
                    time.sleep(0.001)
                elif not block and error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                else:
                    raise CenterError(
                        f"The file system refused a record lock ({error.strerror}). Put the run "
                        "on a local file system, or mount this one with locking."
                    ) from error
            else:
                return True

    def _give_back(self, number: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    def held_elsewhere(self, number: int) -> bool:
        """Whether another process holds a lock."""
        question = self._FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_GETLK, question)
        return bool(self._FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _forget_in_child() -> None:
    # A forked child has its parent's descriptors but none of its locks.
    RecordLocks._open = {}
    RecordLocks._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
