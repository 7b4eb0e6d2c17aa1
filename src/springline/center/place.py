"""Where a shared center's memory is: a mapped file, in a tmpfs if one has room.

    TMPFS/springline-XXXX/center.memory   the memory
    TMPFS/springline-XXXX/run             where the directory of its center was last seen
    TMPFS/springline-XXXX/identity        which directory that is: the inodes of it and of its lock
    TMPFS/springline-XXXX/missing         since when it is not there any more

Memory belongs to one directory, whose lock guards it. A directory that is moved keeps its inodes
and its memory; a copy has others, and needs memory of its own.

Whoever maps the memory holds a shared `flock` on it (a forked child may keep it longer, which does
no harm), so that nobody frees it as an orphan.
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
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from springline.center.errors import CenterError
from springline.center.layout import Bytes

if sys.platform != "win32":
    import fcntl

TMPFS = Path("/dev/shm")  # noqa: S108 - directories there get unguessable names and mode 0700
MEMORY_NAME, LOCK_NAME = "center.memory", "lock"
_OWNER, _IDENTITY, _MISSING = "run", "identity", "missing"
_NAMES = MEMORY_NAME, _OWNER, f".{_OWNER}", _IDENTITY, _MISSING
_HOME = re.compile(r"springline-[a-z0-9_]{8}\Z")  # as `mkdtemp` makes them
_GRACE = 24 * 3600.0  # seconds that memory outlives a directory which was moved, or removed
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)


def map_memory(path: Path, nbytes: int) -> Bytes:
    """Map a center's memory."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise CenterError(f"{path} is not ours: it belongs to another user, or is no file.")
        if status.st_size < nbytes:
            raise CenterError(f"{path} is shorter than the center it should hold.")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def named(name: object, directory: Path) -> Path:
    """Return the memory that a center's directory names, if it is one of those that we make.

    Raises:
        ValueError: it is not. Whoever wrote it may want us to write to, or remove, another file.
    """
    if name == MEMORY_NAME:
        return directory / MEMORY_NAME
    path = Path(name) if isinstance(name, str) else Path()
    if path.name != MEMORY_NAME or path.parent.parent != TMPFS or not _HOME.match(path.parent.name):
        raise ValueError(f"{name!r} is no memory of a center")
    return path


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
        return
    with contextlib.suppress(OSError):
        for name in _NAMES:
            memory.with_name(name).unlink(missing_ok=True)
        memory.parent.rmdir()


def belongs(memory: Path, directory: Path) -> bool:
    """Whether there is this memory, and it is that of the center in a directory."""
    if memory == directory / MEMORY_NAME:
        return memory.is_file()
    return memory.is_file() and _identity(directory) == _recorded(memory.parent)


def owner_of(memory: Path) -> Path | None:
    """Return the directory that memory in the tmpfs belongs to, where it was last seen."""
    with contextlib.suppress(OSError):
        return Path(memory.with_name(_OWNER).read_text("utf-8"))
    return None


def adopt(memory: Path, directory: Path) -> None:
    """Write down where the center's directory is now. Its lock for creation is held."""
    owner = owner_of(memory)
    if owner and _identity(owner) != _recorded(memory.parent):
        _write_owner(memory, directory)
        memory.with_name(_MISSING).unlink(missing_ok=True)


def in_use(directory: Path) -> bool:
    """Whether a process maps memory of the center that is, or was, in a directory."""
    memories = TMPFS.glob(f"springline-*/{MEMORY_NAME}")
    return any(_stays_mapped(memory) for memory in memories if owner_of(memory) == directory)


def sweep(memory_of: Callable[[Path], Path | None], mine: Path) -> None:
    """Free the memory in the tmpfs that nobody maps and no center needs.

    Its center has other memory; or the directory has not been where it was for a day. It may have
    been moved, which only whoever opens it there can tell.

    Args:
        memory_of: returns the memory that a center's directory names, if it names one.
        mine: a directory whose lock for creation we hold: what it does not name is lost.
    """
    for home in TMPFS.glob("springline-*"):
        with contextlib.suppress(OSError, CenterError):
            memory, missing = home / MEMORY_NAME, home / _MISSING
            directory = owner_of(memory)
            if directory is None or home.stat().st_uid != os.getuid() or _is_mapped(memory):
                continue
            if _identity(directory) == _recorded(home):
                missing.unlink(missing_ok=True)
                named = memory_of(directory)
                lost = named != memory and (named is not None or directory == mine)
            else:
                if not missing.exists():
                    missing.touch(mode=0o600)
                lost = time.time() - missing.stat().st_mtime > _GRACE
            if lost:
                free(memory, directory)


def _make(path: Path, directory: Path, nbytes: int) -> Bytes:
    path.unlink(missing_ok=True)  # left by a creator that was killed
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # before it has an owner: nobody sweeps it
        if path.parent != directory:
            _write(path.with_name(_IDENTITY), _identity(directory) or "")
            _write_owner(path, directory)
        os.posix_fallocate(fd, 0, nbytes)  # a full tmpfs would be a SIGBUS later
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _identity(directory: Path) -> str | None:
    try:
        itself, lock = directory.stat(), (directory / LOCK_NAME).stat()
    except OSError:
        return None
    return f"{itself.st_dev} {itself.st_ino} {lock.st_ino}"


def _recorded(home: Path) -> str:
    with contextlib.suppress(OSError):
        return (home / _IDENTITY).read_text("utf-8")
    return ""


def _write_owner(memory: Path, directory: Path) -> None:
    temporary = memory.with_name(f".{_OWNER}")
    _write(temporary, str(directory))
    temporary.replace(memory.with_name(_OWNER))


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, "utf-8")


def _map(fd: int, nbytes: int) -> Bytes:
    fcntl.flock(fd, fcntl.LOCK_SH)  # for as long as it is mapped: the mapping keeps the file open
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def _stays_mapped(memory: Path) -> bool:
    for _ in range(3):  # a sweep in another process looks like a mapping, for an instant
        if not _is_mapped(memory):
            return False
        time.sleep(0.01)
    return True


def _is_mapped(memory: Path) -> bool:
    try:
        fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
