"""Keeps a run's centers: checkpoints while it runs, a file of the model's own names at the end.

RUN/center/                    the center and its checkpoints
RUN/center.safetensors         the center at the end of the run
RUN/center-NAME/               that of another optimizer of the script
RUN/center-NAME.safetensors    the same at the end
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from springline.center import CenterError, CheckpointError, SharedCenter
from springline.center.checkpoint import describe, newest, read_center, write_tensors
from springline.center.directory import LAYOUT_NAME
from springline.center.extras import with_extras
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import CENTER, RunDirectory, short
from springline.launch.request import NO_STORAGE

if TYPE_CHECKING:
    from springline.center.ray import RayCenter

    Kept = SharedCenter | RayCenter

FINAL = "center.safetensors"
EVERY = 30.0  # seconds from one checkpoint to the next
_LOOK = 0.2  # seconds between two polls for a center
PATIENCE = 10.0  # seconds to wait for a part of it that a process keeps locked


class LostError(CenterError):
    """The center was lost during the run; the message names what is left."""


class Keeper:
    """Saves the center periodically, in a thread of its own.

    It keeps the center open once it has seen it: whatever files are removed, it maps the
    same memory as the workers, and saves that.

    A worker that is stopped in the middle of an exchange keeps its shard's lock for as long, and
    a checkpoint waits for that lock: the thread that watches the workers must not wait with it.

    Args:
        claim: the run's directory.
        say: prints that a checkpoint failed, or files were lost.
        name: the center's directory in it.
        new: whether a center that is there was made in this launch.
    """

    def __init__(
        self,
        claim: RunDirectory,
        say: Callable[[str], None],
        name: str = CENTER,
        new: bool = False,
    ) -> None:
        self._claim = claim
        self.name = name
        self.saved = _modified(self._checkpoint)  # when, in seconds since the epoch
        self.version: int | None = None  # of the final center
        self._center: Kept | None = None
        self._made = None if new else _modified(self._layout)  # when, by an earlier launch
        self._damage = ""  # what was lost, in words
        self._bare = False  # whether everything was, including what is written beside the center
        self._say = say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self) -> None:
        """Start saving; report which checkpoint a center that is not in memory resumes from."""
        if self._layout.exists():
            self._center = self._open()
            saved = None if self._center else newest(self._checkpoint)
            if saved:
                self._say(f"The center goes on from {saved}, version {describe(saved).version}.")
        self._thread.start()

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> Path | None:
        """Write `RUN/center.safetensors` and free the center's memory, when all workers are gone.

        Args:
            hurried: whether the user has asked to stop again; ignored for a center in memory.

        Returns:
            Where the center is now; None if there was none.

        Raises:
            LostError: it is lost, or a part of it.
            CenterError: it could not be written. It is still in memory then.
        """
        self._stop.set()
        self._thread.join()
        center = self._center or self._open()
        if center is None:
            return self._left()
        with center:
            self.version = center.version
            try:
                self._mend(center)
                final = self._write(with_extras(self._directory / self.name, center.values()))
                self._retire(center)
            except (CenterError, OSError) as error:
                if isinstance(error, LostError) or not self._damage:
                    raise
                left = self._describe_left(center.version)
                raise LostError(f"The center could not be saved: {error} {left}") from error
            self.saved = time.time()
            if self._bare:
                raise LostError(
                    f"The center, version {center.version}, is in {final}. It lacks what the "
                    f"model has beside the center (tied names, frozen and integer tensors), if "
                    f"anything: that was in {self._directory / self.name}."
                )
        return final

    def _left(self) -> Path | None:
        """Return what is left where there is no center any more."""
        final, saved = self._directory / f"{self.name}.safetensors", newest(self._checkpoint)
        made = _modified(self._layout)
        if made == self._made:  # in an earlier launch, if at all
            left = final if final.exists() else saved
            if left:
                self._say("No worker has joined the center in this launch: it is as it was.")
            return left
        if made and saved and saved.stat().st_mtime >= made:  # the script has retired it
            return self._write(with_extras(self._directory / self.name, read_center(saved)))
        raise LostError(
            f"The center was lost during the run, before the launcher had opened it. "
            f"{self._describe_left()}"
        )

    def _describe_left(self, version: int | None = None) -> str:
        try:
            saved = newest(self._checkpoint)
        except CheckpointError as error:
            return f"Nothing is left of it: {error}"
        if saved is None:
            return "Nothing is left of it: there is no checkpoint."
        found = describe(saved).version
        older = "" if version is None else f", {version - found} exchanges older"
        return f"What is left of it is {saved}, version {found}{older}."

    def _mend(self, center: Kept) -> None:
        """Put back what a center's directory has lost, and report it once."""
        if not isinstance(center, SharedCenter):
            return
        center.move(self._directory / self.name)
        bare = not center.directory.exists()
        try:
            lost = center.put_back()
        except CenterError as error:  # another one is there
            final = self._write(center.values())
            self._damage = str(error)
            raise LostError(
                f"{error} The run's own, version {center.version}, is in {final}."
            ) from error
        if lost and not self._damage:
            self._say(f"{lost} during the run. The launcher still has the center, and saves it.")
        self._damage, self._bare = self._damage or lost or "", self._bare or bare

    def _write(self, tensors: Mapping[str, NDArray[Any]]) -> Path:
        final = self._directory / f"{self.name}.safetensors"
        write_tensors(final, tensors)
        return final

    @property
    def _directory(self) -> Path:
        return self._claim.path

    @property
    def _layout(self) -> Path:
        return self._directory / self.name / LAYOUT_NAME

    @property
    def _checkpoint(self) -> Path:
        return self._directory / self.name / CHECKPOINT_NAME

    def _open(self) -> Kept | None:
        """Open the center; None if there is none."""
        try:
            center = SharedCenter.open(self._directory / self.name, timeout=PATIENCE)
        except (CenterError, OSError):  # not made yet, or freed this very moment
            return None
        try:
            center.keep()
        except (CenterError, OSError):
            center.close()
            return None
        return center

    def _retire(self, center: Kept) -> None:
        """Save the center for the last time and free its memory."""
        center.retire()

    def _keep(self) -> None:
        failed, due = False, time.monotonic() + EVERY
        while not self._stop.wait(_LOOK):
            try:
                self._center = self._center or self._open()
                if self._center is None or time.monotonic() < due:
                    continue
                due = time.monotonic() + EVERY
                self._mend(self._center)
                self._center.save(self._checkpoint)
                self.saved, failed = time.time(), False
            except (CenterError, OSError) as error:
                if not failed and not self._stop.is_set():  # once, not every 30 seconds
                    self._say(f"No checkpoint: {error}")
                failed = True


class OtherKeepers:
    """Keeps the centers of a run's other optimizers, each with a keeper of its own.

    Args:
        claim: the run's directory.
        say: prints what is lost, and where a center is at the end.
    """

    def __init__(self, claim: RunDirectory, say: Callable[[str], None]) -> None:
        self._claim, self._say = claim, say
        self._keepers: dict[str, Keeper] = {}
        self._begun = False  # whether workers may have made some

    def look(self) -> None:
        """Begin to keep the centers that are new."""
        for name in sorted({path.parent.name for path in self._layouts()} - self._keepers.keys()):

            def say(text: str, name: str = name) -> None:
                self._say(f"{name}: {text}")

            keeper = Keeper(self._claim, say, name, new=self._begun)
            keeper.start()
            self._keepers[name] = keeper
        self._begun = True

    def finish(self) -> bool:
        """Write the final centers when all workers are gone.

        Returns:
            Whether all are written and whole; what is not is reported.
        """
        whole = True
        try:
            self.look()
        except CenterError as error:
            whole = False
            self._say(str(error))
        for name, keeper in self._keepers.items():
            try:
                if final := keeper.finish():
                    version = "" if keeper.version is None else f" (version {keeper.version:,})"
                    self._say(f"{name} is in {short(final)}{version}.")
            except (CenterError, OSError) as error:
                whole = False
                self._say(f"{name}: {error}")
        return whole

    def _layouts(self) -> list[Path]:
        return list(self._claim.path.glob(f"{CENTER}-*/{LAYOUT_NAME}"))


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
