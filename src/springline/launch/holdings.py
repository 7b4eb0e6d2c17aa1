"""What runs hold: their centers' memory in the tmpfs, and their directories on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from springline.center import CenterError
from springline.center.directory import LAYOUT_NAME, memory_of
from springline.center.memory_file import MEMORY_NAME, belongs, is_owner
from springline.center.segments import Segment, segments
from springline.launch.directory import CENTER, is_run


@dataclass(frozen=True)
class Holding:
    """A run and the memory of its centers; or memory whose run is gone."""

    path: Path  # the run's; of memory that was never a run's, its own
    segments: tuple[Segment, ...]
    gone: bool = False

    @property
    def memory(self) -> int:
        """Bytes in the tmpfs."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def centers(self) -> list[Path]:
        """The directories of its centers: of those in the tmpfs wherever they are."""
        return sorted({*_centers(self.path), *(s.owner for s in self.segments if s.owner)})


def find_holdings(directory: Path) -> list[Holding]:
    """Find the runs in a directory, and all other memory of this user in the tmpfs.

    Args:
        directory: where runs are; or one run's own, and then only that is found.
    """
    found = list(segments())
    runs = find_runs(directory)
    owners = dict(_owned({*runs, *(run for segment in found for run in _beside(segment))}))
    held: dict[Path, list[Segment]] = {run: [] for run in runs}
    gone: dict[Path, list[Segment]] = {}
    for segment in found:
        owner = owners.get(segment.memory)
        if owner is None and segment.owner and is_owner(segment.owner, segment.path):
            owner = segment.owner
        if owner:
            now = Segment(segment.path, owner, segment.nbytes, segment.mapped)
            held.setdefault(_run_of(owner), []).append(now)
        else:
            gone.setdefault(_was_of(segment), []).append(segment)
    if runs == [directory.absolute()]:
        return [Holding(runs[0], tuple(held[runs[0]]))]
    return [
        *(Holding(path, tuple(its)) for path, its in held.items()),
        *(Holding(path, tuple(its), gone=True) for path, its in gone.items()),
    ]


def find_runs(directory: Path) -> list[Path]:
    """Return the runs in a directory, or the directory if it is a run's own."""
    directory = directory.absolute()
    with contextlib.suppress(OSError):
        if is_run(directory):
            return [directory]
        return sorted(path for path in directory.iterdir() if path.is_dir() and _is_run(path))
    return []


def disk_usage(directory: Path) -> tuple[int, float]:
    """Return the bytes that a directory takes on disk, and when a file there last changed."""
    total, changed = 0, 0.0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # files come and go
                status = Path(root, name).lstat()
                total += status.st_blocks * 512
                changed = max(changed, status.st_mtime)
    return total, changed


def _is_run(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_run(path)
    return False


def _beside(segment: Segment) -> list[Path]:
    """Return which runs a center may be in whose directory is not where it was."""
    owner = segment.owner
    if owner is None or is_owner(owner, segment.path):
        return []
    return [*find_runs(owner.parent), *find_runs(owner.parent.parent)]


def _owned(runs: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Find the memory of the centers in some runs: its file, and the center's directory."""
    for run in runs:
        for center in _centers(run):
            with contextlib.suppress(CenterError, OSError):
                memory = memory_of(center)
                if memory and belongs(memory, center):
                    yield memory, center


def _centers(run: Path) -> list[Path]:
    names = LAYOUT_NAME, MEMORY_NAME
    with contextlib.suppress(OSError):
        return [d for d in (run, *run.iterdir()) if any((d / name).is_file() for name in names)]
    return []


def _was_of(segment: Segment) -> Path:
    """Return whose memory it was: a run's, a center's without a run, or unknown."""
    owner = segment.owner
    if owner and (owner.name == CENTER or owner.name.startswith(f"{CENTER}-")):
        return owner.parent
    return owner or segment.path


def _run_of(center: Path) -> Path:
    return center.parent if _is_run(center.parent) else center
