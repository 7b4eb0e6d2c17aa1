"""The directory of a shared center: claimed, and its layout read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from springline import files
from springline.center.locks import RecordLocks
from springline.center.memory_file import LOCK_NAME, MEMORY_NAME, named, owner_of
from springline.center.plan import Plan
from springline.errors import CenterError, DamagedError
from springline.sealed import read_json, reading, write_json

FORMAT = 5
LAYOUT_NAME = "layout.json"


def check_platform() -> None:
    """Refuse an operating system that has not what a shared center needs."""
    if sys.platform != "linux":
        raise CenterError(
            f"The shared center needs Linux (record locks, tmpfs); this is {sys.platform}. "
            "A script alone, without `springline run`, works everywhere."
        )


def claim(directory: Path) -> Path:
    """Return the directory, made or checked to be ours."""
    check_platform()
    try:
        directory = directory.absolute()
        for new in reversed([p for p in (directory, *directory.parents) if not p.exists()]):
            new.mkdir(mode=0o700, exist_ok=True)
        owner = directory.stat().st_uid
        names = {p.name for p in directory.iterdir()}
        begun = {LOCK_NAME, MEMORY_NAME}  # by a creator that was killed
        others = sorted(n for n in names - begun if not files.is_leftover(n))
        if owner == os.getuid() and others and LAYOUT_NAME not in names:
            raise CenterError(
                f"{directory} is not a center's directory: it holds {others[0]!r}. "
                "Give a new or an empty one."
            )
        if owner != os.getuid():
            raise CenterError(f"{directory} belongs to another user (id {owner}).")
        directory.chmod(0o700)
    except OSError as error:
        raise CenterError(
            f"Cannot use {directory} for a center: {error.strerror}. Give a directory that you "
            "may write to."
        ) from error
    return directory


def read_layout(directory: Path) -> tuple[Plan, Path] | None:
    """Read what a center is and where its memory is, or was; None if there is no center yet."""
    path = directory / LAYOUT_NAME
    try:
        with reading(path, "Start in a new directory."):
            values = read_json(path)
            if values["format"] != FORMAT:
                raise DamagedError(
                    f"{path} is not of a center that this springline can read. "
                    "Start in a new directory."
                )
            return Plan.from_json(values["plan"]), named(values["memory"], directory)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_layout(directory: Path, plan: Plan, memory: Path) -> None:
    """Write what `read_layout` reads."""
    place = memory.name if memory.parent == directory else str(memory)
    path = directory / LAYOUT_NAME
    try:
        write_json(path, {"format": FORMAT, "memory": place, "plan": plan.to_json()})
    except OSError as error:
        raise CenterError(f"Could not write {path}: {error.strerror}.") from error


def no_checkpoint(directory: Path, path: Path) -> CenterError:
    """Return why a center cannot be had: it is not in memory, and nothing was saved."""
    owner = owner_of(path) if path.exists() else None
    if owner and owner != directory.absolute():
        return CenterError(
            f"{directory} is a copy of {owner}, made before there was a checkpoint: only the "
            "original has the center in memory. Copy it again when it has a checkpoint."
        )
    return CenterError(
        f"The memory of the center in {directory} is gone and there is no checkpoint. Was the "
        "machine restarted? Or was the directory copied or moved during its run? Then the other "
        "directory has the center. Start in a new one."
    )


def memory_of(directory: Path) -> Path | None:
    """Return the memory that a center's directory names, if it names one."""
    found = read_layout(directory)
    return None if found is None else found[1]


def open_locks(directory: Path) -> RecordLocks:
    """Return this process's locks of a center."""
    try:
        return RecordLocks(directory / LOCK_NAME)
    except OSError as error:
        raise CenterError(f"Cannot open {directory / LOCK_NAME}: {error.strerror}.") from error
