"""Where a shared center's memory is: a mapped file, in a tmpfs if one has room.

    TMPFS/springline-XXXX/center.memory   the memory
    TMPFS/springline-XXXX/run             the directory of the center it belongs to

Whoever maps the memory holds a shared `flock` on it (a forked child may keep it longer, which does
no harm), so that nobody frees it as an orphan.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from springline.center.errors import CenterError
from springline.center.layout import Bytes

if sys.platform != "win32":
    import fcntl

TMPFS = Path("/dev/shm")  # noqa: S108 - directories there get unguessable names and mode 0700
MEMORY_NAME = "center.memory"
_OWNER = "run"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)


def map_memory(path: Path, nbytes: int) -> Bytes:
    """Map a center's memory."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < nbytes:
            raise CenterError(f"{path} is shorter than the center it should hold.")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def new_memory(directory: Path, nbytes: int) -> tuple[Path, Bytes]:
    """Make and map a file where there is room for it, all of it reserved."""
    room = {}
    for place in (TMPFS, directory):
        if not place.is_dir():
            continue
        status = os.statvfs(place)
        room[place] = status.f_bavail * status.f_frsize
        if room[place] < nbytes:
            continue
        path = directory / MEMORY_NAME
        try:
            if place == TMPFS:
                path = Path(tempfile.mkdtemp(prefix="springline-", dir=TMPFS)) / MEMORY_NAME
            return path, _make(path, directory, nbytes)
        except OSError as error:
            free(path, directory)
            if error.errno not in _NO_ROOM:
                raise
    rooms = ", ".join(f"{place} has {size / 1e9:.1f} GB" for place, size in room.items())
    raise CenterError(f"No room for a center of {nbytes / 1e9:.1f} GB: {rooms}. Free some.")


def free(memory: Path, directory: Path) -> None:
    """Remove a center's memory; processes that map it keep what they have."""
    if memory.parent == directory:
        memory.unlink(missing_ok=True)
    else:
        shutil.rmtree(memory.parent, ignore_errors=True)


def sweep(memory_of: Callable[[Path], Path | None], mine: Path) -> None:
    """Free the memory in the tmpfs that nobody maps and whose center has other memory, or is gone.

    Args:
        memory_of: returns the memory that a center's directory names, if it names one.
        mine: a directory whose lock for creation we hold: what it does not name is lost.
    """
    for home in TMPFS.glob("springline-*"):
        with contextlib.suppress(OSError, CenterError):
            if home.stat().st_uid != os.getuid():
                continue
            directory = Path((home / _OWNER).read_text("utf-8"))
            named = memory_of(directory)
            known = named == home / MEMORY_NAME or (named is None and directory != mine)
            lost = not directory.exists() or not known
            if lost and not _is_mapped(home / MEMORY_NAME):
                shutil.rmtree(home, ignore_errors=True)


def _make(path: Path, directory: Path, nbytes: int) -> Bytes:
    path.unlink(missing_ok=True)  # left by a creator that was killed
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # before it has an owner: nobody sweeps it
        if path.parent != directory:
            owner = path.with_name(_OWNER)
            owner.touch(mode=0o600)
            owner.write_text(str(directory), "utf-8")
        os.posix_fallocate(fd, 0, nbytes)  # a full tmpfs would be a SIGBUS later
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> Bytes:
    fcntl.flock(fd, fcntl.LOCK_SH)  # for as long as it is mapped: the mapping keeps the file open
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def _is_mapped(memory: Path) -> bool:
    if not memory.exists():
        return False
    fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
