"""Where the center of a run on a cluster belongs: its name there, and its place in a storage."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from springline.center import CenterError, CheckpointError
from springline.center.checkpoint import describe, newest
from springline.center.ray import LINGER
from springline.center.served.center import read_stored
from springline.center.served.founding import find_center
from springline.center.served.head import GRACE
from springline.center.served.storage import Storage
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import CENTER, LaunchError
from springline.launch.keeper import keep_copy
from springline.launch.request import NO_STORAGE, ClusterRequest
from springline.launch.state import CenterStatus, LaunchState
from springline.launch.watch import open_center

_SHARDS = "shards"
_LETTERS = 8
_LEAVING = GRACE + 5.0  # seconds that workers of a launcher that was killed may take to be gone


def center_name(directory: Path) -> str:
    """Return the name of a run's center: the one that it has, wherever its directory is by now.

    That of a new run is drawn: another machine may have a directory of the same path. A run of an
    earlier version has written down none, and is called after its path.
    """
    before = LaunchState.last(directory)
    if before and before.center:
        return before.center
    if not (before and before.cluster) and CenterStatus.read(directory / CENTER) is None:
        return f"{directory.name}-{uuid.uuid4().hex[:_LETTERS]}"
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    return f"{directory.name}-{digest[:_LETTERS]}"


def storage_of(asked: ClusterRequest, directory: Path, name: str) -> str | None:
    """Return the run's own place for checkpoints, below the one that the user gave."""
    if asked.storage == NO_STORAGE:
        return None
    if asked.storage:
        between = "" if asked.storage.endswith("/") else "/"
        return f"{asked.storage}{between}{name}"
    return str(directory / CENTER / _SHARDS)


def check_center(directory: Path, name: str, storage: str | None) -> bool:
    """Refuse a run whose center is gone or in use, and a new one that would find another run's.

    Returns:
        Whether the run goes on from its storage.
    """
    made = CenterStatus.read(directory / CENTER) is not None
    new = not made and LaunchState.last(directory) is None
    alive, kept = open_center(name) is not None, _is_kept(storage)
    if made and not alive and not kept:
        where = f"is not in {storage} any more" if storage else "was started with `--storage none`"
        raise LaunchError(
            f"The center of the run in {directory} {where}: it is gone, and the run cannot go on. "
            "Its last checkpoint can still be read with `springline export`. Start a new run."
        )
    if new and alive:
        raise LaunchError(
            f"The run in {directory} is new, but its center, {name}, is on the cluster already: "
            "that of another run. Wait until it has retired, "
            f"{LINGER / 60:.0f} minutes after its last worker has left, or start again."
        )
    if new and kept:
        raise LaunchError(
            f"The run in {directory} is new, but {storage} holds the center of another run. "
            "Start in another directory with `--run`; or remove it, "
            f"after `springline export {storage} FILE` if it is still wanted."
        )
    if alive:
        _wait_for_the_last_workers(directory, name)
    return made and not alive


def keep_newer(directory: Path, storage: str, say: Callable[[str], None]) -> None:
    """Keep the copy of the center in the run directory if the storage is behind it, and say so."""
    copy = newest(directory / CENTER / CHECKPOINT_NAME)
    if copy is None:
        return
    ours, stored = describe(copy).version, read_stored(storage).version
    if stored < ours:
        kept = keep_copy(directory, copy)
        say(
            f"{storage} has the center of version {stored}, older than the copy in the run "
            f"directory, version {ours}: its checkpoints may have failed. The run goes on from "
            f"version {stored}; the copy is kept as {kept}."
        )


def _wait_for_the_last_workers(directory: Path, name: str) -> None:
    deadline = time.monotonic() + _LEAVING
    while members := _members(name):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Workers of another launcher are at work with {name}, the center of the run in "
                f"{directory}: ranks {members}. Is there a copy of this directory in which the run "
                "goes on? Wait for its end, or start a new run."
            )
        time.sleep(0.2)


def _members(name: str) -> list[int]:
    if center := open_center(name):
        with center, contextlib.suppress(CenterError):  # it may end this very moment
            return center.members()
    return []


def _is_kept(storage: str | None) -> bool:
    """Whether there is a center in a storage."""
    if storage is None or ("://" not in storage and not Path(storage).is_dir()):
        return False
    try:
        return find_center(Storage(storage)) is not None
    except CheckpointError as error:
        raise LaunchError(f"{error} Give another with `--storage`.") from error
