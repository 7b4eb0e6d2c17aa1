"""Memory that a process lends to others on the same machine.

They find it under `/proc`, as processes of the same user may. It has no name, so that nothing is
left behind, whoever is killed. What is in another network namespace, or among other processes,
counts as another machine.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from springline.center.layout import Bytes

POSSIBLE = hasattr(os, "memfd_create")  # Linux, with a recent libc
_NAME = "springline"  # what `/proc` shows; nobody can open it by that
_TOKEN = 16
_PAGE = mmap.PAGESIZE
_ANOTHER = "this is another process, perhaps on another machine"


@dataclass(frozen=True)
class Address:
    """Where others find the memory.

    Args:
        machine: the lender's.
        process: the lender's.
        number: the memory's file descriptor there.
        token: what stands behind the memory, so that no other machine's process is taken for it.
        size: of the memory, in bytes.
    """

    machine: str
    process: int
    number: int
    token: str
    size: int


class Lent:
    """The lender's side: zeros at first, of which no page is there before it is written or read.

    Raises:
        OSError: there are no more files, no memory, or no `/proc`.
    """

    def __init__(self, size: int) -> None:
        self._machine = machine()
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            os.truncate(self._file, size + _TOKEN)
            room = mmap.mmap(self._file, size + _TOKEN)
        except BaseException:
            self.close()
            raise
        self._token = secrets.token_bytes(_TOKEN)
        room[-_TOKEN:] = self._token
        self.memory: Bytes = np.frombuffer(room, np.uint8, size)

    @property
    def address(self) -> Address:
        """Where others find it, for as long as it is not closed."""
        size = len(self.memory)
        return Address(self._machine, os.getpid(), self._file, self._token.hex(), size)

    def reserve(self, size: int) -> None:
        """Make sure of the first pages: without it whoever is first to need one may be killed.

        Raises:
            OSError: there is no memory.
        """
        os.posix_fallocate(self._file, 0, size)

    def close(self) -> None:
        """Let go of the memory. Nobody finds it any more; who has it keeps it."""
        self.memory = np.zeros(0, np.uint8)
        self._close()


def borrow(address: Address, populate: bool) -> Bytes:
    """Return the memory of another process.

    Args:
        address: the lender's.
        populate: whether all of its pages are to be there at once.

    Raises:
        OSError: it cannot be reached from here.
    """
    if address.machine != machine():
        raise OSError("this is another machine")
    size = address.size + _TOKEN
    link = Path(f"/proc/{address.process}/fd/{address.number}").readlink()
    if _NAME not in str(link):  # what else it may be, only to open it may have consequences
        raise OSError(_ANOTHER)
    file = open_of(address.process, address.number, os.O_RDWR)
    try:
        if os.fstat(file).st_size == size:
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            room = mmap.mmap(file, size, flags=flags)
            if room[-_TOKEN:].hex() == address.token:
                return np.frombuffer(room, np.uint8, address.size)
    finally:
        os.close(file)  # the map has its own
    raise OSError(_ANOTHER)


def open_of(process: int, number: int, how: int) -> int:
    """Open what another process has open."""
    flags = how | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(f"/proc/{process}/fd/{number}", flags)


def touch(memory: Bytes) -> None:
    """Have every page of a piece of memory at hand; it is only read, as others may write to it."""
    memory[::_PAGE].max(initial=0)


def machine() -> str:
    """Return what is the same for processes that can reach each other's memory.

    Raises:
        OSError: there is no `/proc`.
    """
    start = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    spaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid"))
    return "/".join([start, *(str(inode) for inode in spaces)])
