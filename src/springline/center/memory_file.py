"""The mapped file that is a shared center's memory: in a tmpfs if one has room.

    TMPFS/springline-XXXX/center.memory   the memory
    TMPFS/springline-XXXX/run             where the directory of its center was last seen
    TMPFS/springline-XXXX/identity        which directory that is: the inodes of it and of its lock
    TMPFS/springline-XXXX/missing         since when it is not there any more

Memory belongs to one directory, whose lock guards it. A directory that is moved keeps its inodes
and its memory; a copy has others, and needs memory of its own.

A process that maps the memory holds a shared lock on its first byte (a forked child may keep it
longer, which does no harm). One that frees unmapped memory locks it exclusively, so that
it is not mapped meanwhile. `segments.py` finds what is to be freed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from springline.center.layout import Bytes
from springline.center.locks import record_lock
from springline.errors import CenterError

if sys.platform != "win32":
    import fcntl

TMPFS = Path("/dev/shm")  # noqa: S108 - directories there get unguessable names and mode 0700
MEMORY_NAME, LOCK_NAME = "center.memory", "lock"
MISSING_NAME, _OWNER, _IDENTITY = "missing", "run", "identity"
NAMES = {MEMORY_NAME, _OWNER, f".{_OWNER}", _IDENTITY, MISSING_NAME}
HOME = re.compile(r"springline-[a-z0-9_]{8}\Z")  # as `mkdtemp` makes them
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)


def map_memory(path: Path, nbytes: int) -> Bytes:
    """Map a center's memory."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise CenterError(
                f"{path} is not ours: it belongs to another user, or is not a regular file."
            )
        if status.st_size < nbytes:
            raise CenterError(f"{path} is shorter than the center it should hold.")
        if not _mark(fd):
            raise CenterError(f"{path} is being freed by another process. Start again.")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def named(name: object, directory: Path) -> Path:
    """Return the memory that a center's directory names, if it is one of those that we make.

    Raises:
        ValueError: it is not. It might make us write to, or remove, another file.
    """
    if name == MEMORY_NAME:
        return directory / MEMORY_NAME
    path = Path(name) if isinstance(name, str) else Path()
    if path.name != MEMORY_NAME or path.parent.parent != TMPFS or not HOME.match(path.parent.name):
        raise ValueError(f"{name!r} is not a center's memory")
    return path


def new_memory(directory: Path, nbytes: int) -> tuple[Path, Bytes]:
    """Make and map a file where there is room for it, all of it reserved."""
    (directory / MEMORY_NAME).unlink(missing_ok=True)  # left by a creator that was killed
    room = {}
    for place in (TMPFS, directory):
        if not place.is_dir():
            continue
        status = os.statvfs(place)
        room[place] = status.f_bavail * status.f_frsize
        if room[place] < nbytes:
            continue
        try:
            return _make(place, directory, nbytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
    rooms = ", ".join(f"{place} has {size / 1e9:.1f} GB" for place, size in room.items())
    raise CenterError(f"No room for a center of {nbytes / 1e9:.1f} GB: {rooms}. Free some.")


def free(memory: Path, directory: Path) -> None:
    """Remove a center's memory; processes that map it keep what they have."""
    if memory.parent == directory:
        memory.unlink(missing_ok=True)
        return
    remove(memory.parent, NAMES)


def remove(home: Path, names: Collection[str]) -> None:
    """Remove files of ours from a directory in the tmpfs, and that if nothing else is there."""
    with contextlib.suppress(OSError):
        for name in sorted(names, key=lambda name: name != MEMORY_NAME):  # the memory first
            (home / name).unlink(missing_ok=True)
        home.rmdir()


def belongs(memory: Path, directory: Path) -> bool:
    """Whether there is this memory, and it is that of the center in a directory."""
    if memory == directory / MEMORY_NAME:
        return memory.is_file()
    return memory.is_file() and is_owner(directory, memory.parent)


def owner_of(memory: Path) -> Path | None:
    """Return the directory that memory in the tmpfs belongs to, where it was last seen."""
    with contextlib.suppress(OSError, ValueError):  # what is no text names no directory
        text = memory.with_name(_OWNER).read_text("utf-8")
        return Path(text) if "\0" not in text else None
    return None


def adopt(memory: Path, directory: Path) -> None:
    """Write down where the center's directory is now. Its lock for creation is held."""
    owner = owner_of(memory)
    if owner and not is_owner(owner, memory.parent):
        _write_owner(memory, directory)
        memory.with_name(MISSING_NAME).unlink(missing_ok=True)


def is_owner(directory: Path, home: Path) -> bool:
    """Whether memory in the tmpfs belongs to the center in this directory."""
    with contextlib.suppress(OSError, ValueError):
        status = home.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        return ours and (home / _IDENTITY).read_text("utf-8") == _identity(directory)
    return False


def is_mapped(memory: Path) -> bool:
    """Whether a process maps a center's memory. Takes no lock to find out."""
    with _opened(memory) as fd:
        return fd >= 0 and record_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK


@contextlib.contextmanager
def unmapped(memory: Path) -> Iterator[bool]:
    """Whether there is a memory that no process maps; none begins to within the block."""
    with _opened(memory) as fd:
        yield fd >= 0 and _lock(fd, fcntl.F_WRLCK)


def _make(place: Path, directory: Path, nbytes: int) -> tuple[Path, Bytes]:
    path, fd = directory / MEMORY_NAME, -1
    try:
        while fd < 0:
            if place == TMPFS:
                path = Path(tempfile.mkdtemp(prefix="springline-", dir=TMPFS)) / MEMORY_NAME
            try:
                fd = _open_new(path)
            except FileNotFoundError:
                if place != TMPFS:
                    raise
        if place == TMPFS:
            _write(path.with_name(_IDENTITY), _identity(directory) or "")
            _write_owner(path, directory)
        os.posix_fallocate(fd, 0, nbytes)  # a full tmpfs would be a SIGBUS later
        return path, _map(fd, nbytes)
    except BaseException:
        free(path, directory)
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _open_new(path: Path) -> int:
    """Create a memory's file and mark it; -1 if a sweep in another process was faster."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    if _mark(fd):
        return fd
    os.close(fd)
    return -1


def _identity(directory: Path) -> str | None:
    try:
        itself, lock = directory.stat(), (directory / LOCK_NAME).stat()
    except OSError:
        return None
    return f"{itself.st_dev} {itself.st_ino} {lock.st_ino}"


def _write_owner(memory: Path, directory: Path) -> None:
    temporary = memory.with_name(f".{_OWNER}")
    _write(temporary, str(directory))
    temporary.replace(memory.with_name(_OWNER))


def _write(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _mark(fd: int) -> bool:
    """Mark memory as mapped, for as long as it is: the mapping keeps the file open."""
    return _lock(fd, fcntl.F_RDLCK) and os.fstat(fd).st_nlink > 0  # else it is being freed


def _lock(fd: int, kind: int) -> bool:
    try:
        record_lock(fd, fcntl.F_OFD_SETLK, kind)
    except BlockingIOError:
        return False
    return True


def _map(fd: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


@contextlib.contextmanager
def _opened(memory: Path) -> Iterator[int]:
    """Open a memory's file; -1 if there is none."""
    fd = -1
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)
