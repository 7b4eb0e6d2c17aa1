"""How the files of a worker on another machine come to the run's directory.

They are asked for again and again, in pieces. The launcher says what it has, so that a piece that
was lost on its way is sent again. Output and metrics only grow, and what is new is appended. Other
files are replaced, as soon as all pieces of one are here.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from springline.center.extras import NAME as EXTRAS
from springline.launch.directory import CENTER, LOCK
from springline.launch.state import NAME as STATE_NAME
from springline.launch.state import STATUS_NAME
from springline.run import REPORT

_PIECE = 1 << 24  # bytes of a file that are sent at once; with so many an answer is full
_GROWING = ("logs", "metrics")
# What the run needs while it goes on. The rest of what a worker writes comes when it has ended.
_SMALL = ("total", REPORT, f"{CENTER}/{EXTRAS}")
_NOT_OURS = ("stop", LOCK, STATE_NAME, f"{CENTER}/{STATUS_NAME}")
Stamp = tuple[int, int]  # size and time of a file that is replaced; zeros for one that grows
Stamps = dict[str, tuple[int, int]]  # size and time of every file, by name
Have = dict[str, tuple[Stamp, int]]  # how much of which version, by name


@dataclass(frozen=True)
class Piece:
    """A piece of a file.

    Args:
        name: of the file, below the worker's directory.
        stamp: of which version.
        start: where in it.
        data: the bytes.
        last: whether no more is known of.
    """

    name: str
    stamp: Stamp
    start: int
    data: bytes
    last: bool


def pieces(
    directory: Path, have: Mapping[str, tuple[Stamp, int]], final: Stamps | None = None
) -> list[Piece]:
    """Return the next piece of files of which the launcher has not all, until they are enough.

    Args:
        directory: the worker's.
        have: what the launcher has.
        final: all its files when it had just ended, of which no more than was there then is sent;
            None while it runs.
    """
    found: list[Piece] = []
    size = 0
    names = sorted(final) if final is not None else filter(_is_urgent, sorted(stamps(directory)))
    for name in names:
        piece = _piece(directory, name, have, final[name] if final is not None else None)
        if piece:
            found.append(piece)
            size += len(piece.data)
        if size >= _PIECE:
            break
    return found


def stamps(directory: Path) -> Stamps:
    """Return the files of a worker; what cannot be looked at is left out."""
    found: Stamps = {}
    for folder, _, files in os.walk(directory):
        for path in (Path(folder, file) for file in files if not file.startswith(".")):
            name = path.relative_to(directory).as_posix()
            with contextlib.suppress(OSError):  # removed or replaced this very moment
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and name not in _NOT_OURS:
                    found[name] = status.st_size, status.st_mtime_ns
    return found


def _grows(name: str) -> bool:
    return name.split("/")[0] in _GROWING


def _is_urgent(name: str) -> bool:
    return name in _SMALL or _grows(name)


def _piece(
    directory: Path, name: str, have: Mapping[str, tuple[Stamp, int]], final: Stamp | None
) -> Piece | None:
    try:
        with (directory / name).open("rb") as file:
            status = os.fstat(file.fileno())
            version = final or (status.st_size, status.st_mtime_ns)
            size = min(version[0], status.st_size)
            stamp = (0, 0) if _grows(name) else version
            known, start = have.get(name, (stamp, -1))
            if known != stamp:
                start = -1
            if start >= size:
                return None
            start = max(0, start)
            file.seek(start)
            data = file.read(min(_PIECE, size - start))
    except OSError:  # replaced this very moment, or not to be read: the worker goes on
        return None
    return Piece(name, stamp, start, data, start + len(data) >= size)


class Fetched:
    """What has come of one worker's files, in the run's directory.

    Args:
        directory: the run's.
        rank: the worker's.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self.have: Have = {}

    def take(self, piece: Piece) -> None:
        """Write a piece to its place.

        Raises:
            OSError: it cannot be written, or not under that name.
        """
        inside = PurePosixPath(piece.name)
        if inside.is_absolute() or ".." in inside.parts or piece.name in _NOT_OURS:
            raise PermissionError(f"no file of a worker may be called {piece.name!r}")
        known, have = self.have.get(piece.name, (piece.stamp, 0))
        if known == piece.stamp and piece.start < have:
            return  # it came before
        path = self._directory / inside
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if piece.stamp == (0, 0):
            _write(path, piece.data, os.O_APPEND)
        else:
            part = path.with_name(f".{path.name}.{self._rank}")
            _write(part, piece.data, os.O_APPEND if piece.start else os.O_TRUNC)
            if piece.last:
                part.replace(path)
        self.have[piece.name] = piece.stamp, piece.start + len(piece.data)


def _write(path: Path, data: bytes, how: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
    try:
        before = os.fstat(fd).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.ftruncate(fd, before)  # it will come again, as a whole
            raise
    finally:
        os.close(fd)
