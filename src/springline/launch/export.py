"""`springline export`: a run's center as a file of its own, wherever it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from springline.center import CenterError, CheckpointError, RoundTimeoutError, SharedCenter
from springline.center.checkpoint import describe, newest, read_center, write_tensors
from springline.center.directory import LAYOUT_NAME
from springline.center.extras import with_extras
from springline.center.remote.center import read_stored
from springline.center.remote.registration import NAME as HEAD
from springline.center.shared import CHECKPOINT_NAME
from springline.errors import DamagedError
from springline.launch.directory import CENTER, LaunchError, find_run
from springline.launch.keeper import FINAL, PATIENCE, storage_of
from springline.launch_state import LaunchState
from springline.sealed import open_tensors, reading


def export(run: str | Path, path: Path, force: bool = False) -> str:
    """Write a run's center to a file of its own, under the model's own names.

    From memory while it is there, else from the newest checkpoint, else from the file that the
    run left at its end.

    Args:
        run: its directory; or, of a run on a cluster, its place in a storage.
        path: the file to write.
        force: whether to replace a file that is there.

    Returns:
        Where the center was taken from.
    """
    if path.is_dir():
        raise LaunchError(f"{path} is a directory. Give the name of a file.")
    if path.exists() and not force:
        raise LaunchError(f"{path} is there already. Give another name, or `--force`.")
    if not path.absolute().parent.is_dir():
        raise LaunchError(f"There is no directory {path.absolute().parent} to write to.")
    if "://" in str(run) or any(Path(run).glob(f"{HEAD}.?.safetensors")):
        tensors, source = _find_stored(str(run))
    else:
        tensors, source = _find_center(find_run(Path(run)))
    write_tensors(path, tensors)
    return source


def _find_center(directory: Path) -> tuple[Mapping[str, NDArray[Any]], str]:
    place = directory / CENTER
    if (directory / LAYOUT_NAME).exists():  # a center that was made without a run
        place = directory
    try:
        with SharedCenter.open(place, timeout=PATIENCE) as center:
            return with_extras(place, center.values()), f"version {center.version}, from memory"
    except CenterError as error:
        saved, why = newest(place / CHECKPOINT_NAME), str(error)
        why_not = isinstance(error, RoundTimeoutError | DamagedError)
        busy = f". Not from memory: {error}" if why_not else ""
    state, final = LaunchState.read(directory), directory / FINAL
    if saved is not None:
        written = time.strftime("%d %b %H:%M:%S", time.localtime(saved.stat().st_mtime))
        source = f"version {describe(saved).version} of {written}, from {saved}{busy}"
        return with_extras(place, read_center(saved)), source
    if state and state.cluster and state.center and not (state.ended and final.exists()):
        storage = storage_of(state.cluster.storage, directory, state.center)
        if storage is None:
            raise LaunchError(
                f"The center of the run in {directory} is on its cluster only (`--storage none`): "
                "it is written here when the run ends."
            )
        tensors, source = _find_stored(storage)
        return with_extras(place, tensors), source
    if final.exists():
        with reading(final, "Is there a copy?", CheckpointError):
            return open_tensors(final).tensors(), f"from {final}"
    if state and state.ps:
        raise LaunchError(
            f"The center of the run in {directory} was on TensorFlow's parameter servers. What is "
            "left of it is what the script has saved (`swapping_saver`)."
        )
    if (place / LAYOUT_NAME).exists():
        raise LaunchError(why)
    raise LaunchError(
        f"The run in {directory} has no center yet: no worker has made one here. That of workers "
        "that were started without a launcher on a cluster is in their SPRINGLINE_STORAGE: give "
        "that instead."
    )


def _find_stored(storage: str) -> tuple[Mapping[str, NDArray[Any]], str]:
    stored = read_stored(storage)
    source = f"version {stored.version}, from the checkpoints of its shards in {storage}"
    return stored.values, f"{source}; one that is still on its cluster may be newer"
