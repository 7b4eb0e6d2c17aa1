"""`springline clean`: free what no process uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from springline.center import CenterError, SharedCenter
from springline.center.directory import open_locks, read_layout
from springline.center.locks import CREATE
from springline.center.memory_file import MEMORY_NAME, belongs, free, is_mapped, map_memory
from springline.center.shared import CHECKPOINT_NAME
from springline.files import is_leftover, remove_leftover
from springline.launch.directory import is_at_work, short
from springline.launch.holdings import Holding, find_holdings
from springline.launch.keeper import PATIENCE


@dataclass(frozen=True)
class Unused:
    """Something that can be freed."""

    what: str  # in words
    nbytes: int
    free: Callable[[], bool]  # returns whether it is freed; looks again whether it is in use


def find_unused(directory: Path) -> list[Unused]:
    """Find what no process uses: of the runs in a directory, and of this user in the tmpfs."""
    found: list[Unused] = []
    for holding in find_holdings(directory):
        with contextlib.suppress(CenterError, OSError):  # damaged, or another user's: not touched
            found += _gone(holding) if holding.gone else _of_run(holding)
    return found


def free_all(found: list[Unused]) -> tuple[int, list[str]]:
    """Free all that is still unused; return how many bytes, and in words what was not freed."""
    freed, failed = 0, []
    for unused in found:
        try:
            done, why = unused.free(), "It is in use now."
        except (CenterError, OSError) as error:
            done, why = False, str(error)
        freed += done * unused.nbytes
        if not done:
            failed.append(f"{unused.what}. Not freed: {why}")
    return freed, failed


def retire_unused(directory: Path) -> bool:
    """Save the center in a directory as its checkpoint and free its memory, if it is unused.

    A worker that joins meanwhile waits, and resumes from the checkpoint.

    Returns:
        Whether it is freed.
    """
    with contextlib.closing(open_locks(directory)) as locks:
        if not locks.try_acquire(CREATE):
            return False
        found = read_layout(directory)
        if found is None:  # its maker was killed
            free(directory / MEMORY_NAME, directory)
            return True
        plan, memory = found
        if not belongs(memory, directory) or is_mapped(memory):
            return False
        center = SharedCenter(directory, plan, memory, map_memory(memory, plan.nbytes), locks)
        center.timeout = PATIENCE
        center.save()
        free(memory, directory)
        return True


def _gone(holding: Holding) -> Iterator[Unused]:
    for segment in holding.segments:
        if segment.mapped:
            continue
        what = f"{segment.path}: left by a process that was killed"
        if segment.fate == "missing":
            what = f"{segment.path}: the memory of {short(holding.path)}, which is gone. "
            what += "Was it moved? Then clean the directory that it is in now"
        yield Unused(what, segment.nbytes, partial(segment.free, segment.fate))


def _of_run(holding: Holding) -> Iterator[Unused]:
    run = holding.path
    in_use = any(segment.mapped for segment in holding.segments) or is_at_work(run)
    if in_use or run.stat().st_uid != os.getuid():
        return
    for segment in holding.segments:
        if segment.fate == "lost":
            what = f"{segment.path}: {short(run)} has other memory now"
            yield Unused(what, segment.nbytes, partial(segment.free, "lost"))
    for center in holding.centers:
        found = read_layout(center)
        memory = found[1] if found else center / MEMORY_NAME
        if (found and not belongs(memory, center)) or is_mapped(memory):
            continue
        if memory.exists():
            what = f"{short(center)}: the center in memory, saved as {CHECKPOINT_NAME} first"
            yield Unused(what, memory.stat().st_blocks * 512, partial(retire_unused, center))
    for root, _, names in os.walk(run):
        for path in (Path(root, name) for name in names if is_leftover(name)):
            what = f"{short(path)}: left by a process that was killed"
            nbytes = path.lstat().st_blocks * 512
            yield Unused(what, nbytes, partial(_remove, path))


def _remove(path: Path) -> bool:
    remove_leftover(path)
    return not path.exists()
