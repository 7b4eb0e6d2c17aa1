"""Where the center of a run on a cluster belongs: its name there, and its place in a storage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from springline.center import CheckpointError
from springline.center.checkpoint import describe, newest, write_tensors
from springline.center.ray import LINGER
from springline.center.served.center import read_stored
from springline.center.served.founding import find_center
from springline.center.served.storage import Storage
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import CENTER, LaunchError
from springline.launch.keeper import read_center
from springline.launch.request import NO_STORAGE, ClusterRequest
from springline.launch.state import CenterStatus, LaunchState
from springline.launch.watch import open_center

_SHARDS = "shards"


def center_name(directory: Path) -> str:
    """Return the name of a run's center: the same one for the same directory.

    >>> center_name(Path("/home/me/runs/digits"))
    'digits-2d8421a4'
    """
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    return f"{directory.name}-{digest[:8]}"


def storage_of(asked: ClusterRequest, directory: Path) -> str | None:
    """Return the run's own place for checkpoints, below the one that the user gave."""
    if asked.storage == NO_STORAGE:
        return None
    if asked.storage:
        between = "" if asked.storage.endswith("/") else "/"
        return f"{asked.storage}{between}{center_name(directory)}"
    return str(directory / CENTER / _SHARDS)


def check_center(directory: Path, name: str, storage: str | None) -> bool:
    """Refuse a run whose center is gone, and a new one that would find another run's.

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
            "that of an earlier run in a directory of the same name. Wait until it has retired, "
            f"{LINGER / 60:.0f} minutes after its last worker has left, or start in another "
            "directory with `--run`."
        )
    if new and kept:
        raise LaunchError(
            f"The run in {directory} is new, but {storage} holds the center of an earlier run in a "
            "directory of the same name. Start in another directory with `--run`; or remove it, "
            f"after `springline export {storage} FILE` if it is still wanted."
        )
    return made and not alive


def keep_newer(directory: Path, storage: str, say: Callable[[str], None]) -> None:
    """Keep the copy of the center in the run directory if the storage is behind it, and say so."""
    copy = newest(directory / CENTER / CHECKPOINT_NAME)
    if copy is None:
        return
    ours, stored = describe(copy).version, read_stored(storage).version
    if stored < ours:
        kept = directory / f"center-version-{ours}.safetensors"
        write_tensors(kept, read_center(directory / CENTER, copy))
        say(
            f"{storage} has the center of version {stored}, older than the copy in the run "
            f"directory, version {ours}: its checkpoints may have failed. The run goes on from "
            f"version {stored}; the copy is kept as {kept}."
        )


def _is_kept(storage: str | None) -> bool:
    """Whether there is a center in a storage."""
    if storage is None or ("://" not in storage and not Path(storage).is_dir()):
        return False
    try:
        return find_center(Storage(storage)) is not None
    except CheckpointError as error:
        raise LaunchError(f"{error} Give another with `--storage`.") from error
