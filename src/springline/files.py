"""Files that are replaced as a whole: written under a unique name, then renamed.

    .NAME.0123456789abcdef.springline    what is being written; locked for as long

A process that is killed leaves such a file. The next writer of NAME removes it: it is
recognised by its name and by not being locked. One that is removed before its writer has locked it
is made again.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from springline.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

Write = Callable[[BinaryIO], object]
_log = logging.getLogger("springline")
_missing: set[str] = set()  # what this process has warned of
_SUFFIX = ".springline"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}" + re.escape(_SUFFIX), re.DOTALL)


def replace(path: Path, write: Write, keep: Path | None = None) -> None:
    """Write a file atomically, for its owner only.

    Args:
        path: where.
        write: writes to the file that it is given.
        keep: where the file that is there is kept; by default it is not.
    """
    for other in leftovers(path.parent, path.name):
        remove_leftover(other)
    while not _write(path, write, keep):
        pass
    _flush(path.parent)


def write_text(path: Path, text: str | bytes) -> None:
    """Replace a file by a text, for its owner only."""
    replace(path, lambda file: file.write(text.encode() if isinstance(text, str) else text))


def open_to_append(path: Path) -> int:
    """Open a file, made if need be, for its owner only; no link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)


def append(path: Path, data: bytes) -> None:
    """Append to a file in one write, so that lines of several writers stay whole."""
    with open(open_to_append(path), "wb") as file:
        file.write(data)


@contextlib.contextmanager
def open_regular(path: Path, own: bool = False) -> Iterator[BinaryIO]:
    """Open a file to read: no link, no pipe that one would wait at, no directory.

    Args:
        path: where.
        own: whether it must belong to this process's user, too.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # pathlib gives none
    with open(path, "rb", opener=lambda name, f: os.open(name, f | flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if own and hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise OSError(errno.EPERM, "it belongs to another user", str(path))
        yield file


def leftovers(directory: Path, name: str | None = None) -> list[Path]:
    """Return the files in a directory that are being written, or were left.

    Args:
        directory: where.
        name: what they are, or were, to be called; by default anything.
    """
    with contextlib.suppress(OSError):
        found = [(path, _TEMPORARY.fullmatch(path.name)) for path in directory.iterdir()]
        return [path for path, ours in found if ours and name in (None, ours["name"])]
    return []


def is_leftover(name: str) -> bool:
    """Whether a file of this name is one that is being written, or was left."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftover(path: Path) -> int:
    """Remove a file that a process was writing when it was killed.

    Returns:
        The bytes that are freed: 0 for a file that is being written, or that is not ours.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and _lock(fd):
                path.unlink()
                return status.st_blocks * 512
        finally:
            os.close(fd)
    return 0


@contextlib.contextmanager
def can_do_without(what: str) -> Iterator[None]:
    """Warn once where something cannot be written, and go on. Also a decorator.

    Args:
        what: what is not written, for the warning.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        if not _missing:
            atexit.register(_drop_output)
        if what not in _missing:
            _missing.add(what)
            _log.warning("%s cannot be written, training goes on without: %s", what, error)


def _write(path: Path, write: Write, keep: Path | None) -> bool:
    """Write a file; false if it was removed as a leftover before it was locked."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            if not _lock(fd) or not os.fstat(fd).st_nlink:
                return False
            write(file)
            file.flush()
            os.fsync(fd)
            if keep and path.exists():
                path.replace(keep)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _lock(fd: int) -> bool:
    try:
        if sys.platform != "win32":
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flush(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _drop_output() -> None:
    """Drop what was printed and cannot be written: Python would end with an error for that."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # there is none, or it is closed
            pass
