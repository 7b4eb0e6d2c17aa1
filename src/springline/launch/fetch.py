"""How the files of a worker on another machine come to the run's directory.

They are asked for again and again, in pieces. The launcher says what it has, so that a piece that
was lost on its way is sent again. Output and metrics only grow, and what is new is appended. Other
files are replaced, as soon as all pieces of one are here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from springline.center.extras import NAME as EXTRAS
from springline.run import REPORT

_PIECE = 1 << 24  # bytes of a file that are sent at once
_GROWING = ("logs", "metrics")
# What the run needs while it goes on. The rest of what a worker writes comes when it has ended.
_SMALL = ("total", REPORT, f"center/{EXTRAS}")
_NOT_OURS = ("stop", "lock")
Stamp = tuple[int, int]  # size and time of a file that is replaced; zeros for one that grows
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


def pieces(directory: Path, have: Mapping[str, tuple[Stamp, int]], ended: bool) -> list[Piece]:
    """Return the next piece of every file of which the launcher has not all.

    Args:
        directory: the worker's.
        have: what the launcher has.
        ended: whether the worker has: then of all its files.
    """
    found = (_piece(directory, name, have) for name in _names(directory, ended))
    return [piece for piece in found if piece]


def _names(directory: Path, ended: bool) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not path.is_file() or path.name.startswith("."):
            continue
        wanted = ended and name not in _NOT_OURS
        if wanted or name in _SMALL or name.split("/")[0] in _GROWING:
            yield name


def _piece(directory: Path, name: str, have: Mapping[str, tuple[Stamp, int]]) -> Piece | None:
    grows = name.split("/")[0] in _GROWING
    try:
        with (directory / name).open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = (0, 0) if grows else (status.st_size, status.st_mtime_ns)
            known, start = have.get(name, (stamp, -1))
            if known != stamp:
                start = -1
            if start >= status.st_size:
                return None
            file.seek(max(0, start))
            data = file.read(_PIECE)
    except FileNotFoundError:  # replaced this very moment
        return None
    start = max(0, start)
    return Piece(name, stamp, start, data, start + len(data) >= status.st_size)


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
        """Write a piece to its place."""
        known, have = self.have.get(piece.name, (piece.stamp, 0))
        if known == piece.stamp and piece.start < have:
            return  # it came before
        path = self._directory / PurePosixPath(piece.name)
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
    with os.fdopen(fd, "wb") as file:
        file.write(data)
