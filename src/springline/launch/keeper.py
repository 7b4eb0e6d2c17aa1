"""Keeps a run's center: checkpoints while it runs, a file of the model's own names at the end.

RUN/center/               the center and its checkpoints
RUN/center.safetensors    the center at the end of the run
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from springline.center import CenterError, SharedCenter
from springline.center.checkpoint import describe, newest, write_tensors
from springline.center.directory import LAYOUT_NAME
from springline.center.extras import with_extras
from springline.center.served.center import read_stored
from springline.center.served.founding import NAME as HEAD
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import CENTER, LaunchError, find_run
from springline.launch.request import NO_STORAGE
from springline.launch.state import LaunchState

if TYPE_CHECKING:
    from springline.center.ray import RayCenter

    Kept = SharedCenter | RayCenter

FINAL = "center.safetensors"


class Keeper:
    """Saves the center every so often, in a thread of its own.

    A worker that is stopped in the middle of an exchange keeps its shard's lock for as long, and
    a checkpoint waits for that lock: whoever watches the workers must not wait with it.

    Args:
        directory: the run's.
        every: seconds from one checkpoint to the next.
        say: told of a checkpoint that failed.
    """

    def __init__(self, directory: Path, every: float, say: Callable[[str], None]) -> None:
        self._directory = directory
        self.saved = _modified(self._checkpoint)  # when, in seconds since the epoch
        self.version: int | None = None  # of the center that was kept for good
        self._every = every
        self._say = say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self) -> None:
        """Begin to save."""
        self._thread.start()

    def end(self) -> None:
        """Save no more; waits for nothing."""
        self._stop.set()

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> Path | None:
        """Write `RUN/center.safetensors` and free the center's memory, when all workers are gone.

        Args:
            hurried: whether somebody does not want to wait any more; memory never keeps one.

        Returns:
            Where the center is now; None if there was none.

        Raises:
            CenterError: it could not be written. It is still in memory then.
        """
        self._stop.set()
        self._thread.join()
        center = self._open()
        if center is None:
            return self._left()
        with center:
            self.version = center.version
            final = self._write(with_extras(self._directory / CENTER, center.values()))
            self._retire(center)
        self.saved = time.time()
        return final

    def _left(self) -> Path | None:
        """Return what is left where there is no center any more.

        No worker has come so far in this launch; in one before it, one may have.
        """
        final = self._directory / FINAL
        return final if final.exists() else newest(self._checkpoint)

    def _write(self, tensors: Mapping[str, NDArray[Any]]) -> Path:
        final = self._directory / FINAL
        write_tensors(final, tensors)
        return final

    @property
    def _checkpoint(self) -> Path:
        return self._directory / CENTER / CHECKPOINT_NAME

    def _open(self) -> Kept | None:
        """Open the center; None if there is none."""
        try:
            return SharedCenter.open(self._directory / CENTER)
        except (CenterError, OSError):  # not made yet, or freed this very moment
            return None

    def _save(self, center: Kept) -> None:
        """Write a checkpoint of the center."""
        with center:
            center.save(self._checkpoint)

    def _retire(self, center: Kept) -> None:
        """Save the center for the last time and free its memory."""
        center.retire()

    def _keep(self) -> None:
        failed = False
        while not self._stop.wait(self._every):
            try:
                center = self._open()
                if center is None:
                    continue
                self._save(center)
                self.saved, failed = time.time(), False
            except (CenterError, OSError) as error:
                if not failed and not self._stop.is_set():  # once, not every 30 seconds
                    self._say(f"No checkpoint: {error}")
                failed = True


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
        with SharedCenter.open(place) as center:
            return with_extras(place, center.values()), f"version {center.version}, from memory"
    except CenterError:
        saved = newest(place / CHECKPOINT_NAME)
    state, final = LaunchState.last(directory), directory / FINAL
    if saved is not None:
        written = time.strftime("%d %b %H:%M:%S", time.localtime(saved.stat().st_mtime))
        source = f"version {describe(saved).version} of {written}, from {saved}"
        return with_extras(place, _read(saved, "center/")), source
    if state and state.cluster and state.center and not (state.ended and final.exists()):
        storage = storage_of(state.cluster.get("storage"), directory, state.center)
        if storage is None:
            raise LaunchError(
                f"The center of the run in {directory} is on its cluster only (`--storage none`): "
                "it is written here when the run ends."
            )
        tensors, source = _find_stored(storage)
        return with_extras(place, tensors), source
    if final.exists():
        return _read(final, ""), f"from {final}"
    if state and state.ps:
        raise LaunchError(
            f"The center of the run in {directory} was on TensorFlow's parameter servers. What is "
            "left of it is what the script has saved (`swapping_saver`)."
        )
    raise LaunchError(
        f"The run in {directory} has no center yet: no worker has made one here. That of workers "
        "that were started without a launcher on a cluster is in their SPRINGLINE_STORAGE: give "
        "that instead."
    )


def _find_stored(storage: str) -> tuple[Mapping[str, NDArray[Any]], str]:
    stored = read_stored(storage)
    source = f"version {stored.version}, from the checkpoints of its shards in {storage}"
    return stored.values, f"{source}; one that is still on its cluster may be newer"


def storage_of(asked: str | None, directory: Path, name: str) -> str | None:
    """Return where the shards of a run's center keep checkpoints.

    Args:
        asked: what the user gave as `--storage`.
        directory: the run's.
        name: the center's, which has a place of its own below a storage that was given.
    """
    if asked == NO_STORAGE:
        return None
    if asked:
        return f"{asked}{'' if asked.endswith('/') else '/'}{name}"
    return str(directory / CENTER / "shards")


def _modified(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _read(path: Path, prefix: str) -> dict[str, NDArray[Any]]:
    try:
        with safe_open(path, framework="np") as file:
            names = file.keys()  # the file itself cannot be iterated over
            ours = [name for name in names if name.startswith(prefix)]
            return {name.removeprefix(prefix): file.get_tensor(name) for name in ours}
    except (OSError, SafetensorError) as error:
        raise LaunchError(f"{path} cannot be read ({error}).") from error
