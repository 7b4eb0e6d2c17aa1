"""A run's directory: made or found again, and held by one launcher at a time.

RUN/lock    held by the launcher for as long as it lives
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from springline.center import CenterError, SharedCenter
from springline.center.checkpoint import describe, newest
from springline.center.directory import LAYOUT_NAME
from springline.center.locks import RecordLocks
from springline.center.shared import CHECKPOINT_NAME
from springline.errors import DamagedError
from springline.launch_state import NAME as STATE_NAME
from springline.launch_state import CenterStatus

CENTER, LOCK = "center", "lock"
RUNS = "runs"  # where runs are, by default
_OURS = {CENTER, LOCK, STATE_NAME, "metrics"}
_LEAVING = 10.0  # seconds that workers of a launcher that was killed may take to be gone


class LaunchError(RuntimeError):
    """A run cannot start, or a directory is no run; the message gives advice."""


class RunDirectory:
    """A run's directory, held by this process.

    The lock is a record lock: it goes when this process does, and no worker inherits it.

    Args:
        path: new, empty or a run's own; None for a new one in `runs/`.
    """

    def __init__(self, path: Path | None) -> None:
        self._new = path is None
        try:
            self._made = path is None or not path.exists()
            # What others may have written there is not trusted: an address to connect to.
            self.private = self._made or not path or not path.stat().st_mode & 0o022
            self._path = _new() if path is None else _given(path)
            self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.continues = (self.path / STATE_NAME).exists() or (self.path / CENTER).exists()
            self._lock = RecordLocks(self.path / LOCK)
        except OSError as error:
            raise LaunchError(
                f"Cannot use {path or 'runs/'} for a run: {error.strerror}. "
                "Give a directory that you may write to with `--run`."
            ) from error
        if not self._lock.try_acquire(0):
            self._lock.close()
            raise LaunchError(
                f"A run is going on in {self.path}. Watch it with `springline top {self.path}`, "
                "wait for its end, or start in another directory."
            )
        try:
            self._wait_for_the_last_workers()
            (self.path / "stop").unlink(missing_ok=True)  # of an earlier stop
        except BaseException:
            self.release()
            raise

    @property
    def path(self) -> Path:
        """Where the directory is, also after it was moved during the run."""
        if not self._is(self._path):
            with contextlib.suppress(OSError):
                moved = Path(f"/proc/self/fd/{self._fd}").readlink()
                self._path = moved if self._is(moved) else self._path
        return self._path

    def _is(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(path.stat(), os.fstat(self._fd))
        return False

    def make_private(self) -> None:
        """Deny other users access, once the contents have been checked."""
        self._path.chmod(0o700)

    def release(self) -> None:
        """Release the directory for other launchers."""
        self._lock.release(0)
        self._lock.close()
        os.close(self._fd)
        self._fd = -1

    def abandon(self) -> None:
        """Release the directory of a run that could not start; remove it if it was made for it."""
        with contextlib.suppress(OSError):  # it is not empty
            if self._made:  # else another launcher may have the file open
                (self.path / LOCK).unlink()
                self.path.rmdir()
            if self._new:
                self.path.parent.rmdir()
        self.release()

    def configured_workers(self) -> int | None:
        """Return how many workers the run's center is for; None while there is no center.

        Raises:
            LaunchError: there was one, and it is neither in memory nor in a checkpoint.
        """
        place = self.path / CENTER
        try:
            with SharedCenter.open(place) as center:
                return int(center.settings["workers"])
        except DamagedError:
            raise
        except CenterError as error:
            status = CenterStatus.read(place)
            if status:
                return status.plan.workers
            saved = newest(place / CHECKPOINT_NAME)
            if saved is None and (place / LAYOUT_NAME).exists():
                raise LaunchError(str(error)) from error
            return int(describe(saved).settings["workers"]) if saved else None

    def _wait_for_the_last_workers(self) -> None:
        deadline = time.monotonic() + _LEAVING
        while members := _members(self.path / CENTER):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Workers that no launcher started are running in {self.path}: ranks "
                    f"{members}. End them first."
                )
            time.sleep(0.05)


def find_run(path: Path) -> Path:
    """Return the path if it is a run's directory; refuse it otherwise."""
    if not path.is_dir():
        raise LaunchError(f"There is no run in {path}: no such directory.")
    if not is_run(path):
        raise LaunchError(f"{path} is not a run's directory. `springline run` makes them.")
    return path


def is_run(path: Path) -> bool:
    """Whether a directory is a run's, or a center's without a run."""
    return any((path / name).exists() for name in _OURS)


def is_held(path: Path) -> bool:
    """Whether a launcher is at work in a run's directory."""
    if not (path / LOCK).exists():
        return False
    locks = RecordLocks(path / LOCK)
    try:
        return locks.held(0)
    finally:
        locks.close()


def is_at_work(path: Path) -> bool:
    """Whether a launcher, or a worker that was started without one, is at work in a directory."""
    return is_held(path) or bool(_members(path / CENTER))


def short(path: Path) -> Path:
    """Return a path relative to the current directory, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _new() -> Path:
    parent = Path(RUNS).absolute()
    parent.mkdir(exist_ok=True)
    _check_owner(parent)
    name = time.strftime("%Y-%m-%d-%H%M%S")
    for n in range(1, 1000):
        path = parent / (name if n == 1 else f"{name}-{n}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another run began in the same second
            continue
        return path
    raise LaunchError(f"Cannot find a free name in {parent}. Give a directory with `--run`.")


def _given(path: Path) -> Path:
    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise LaunchError(f"`--run` must be a directory. Received: {path}, which is a file.")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path)
    names = {child.name for child in path.iterdir()}
    if names and not names & _OURS:
        raise LaunchError(
            f"{path} is not a run's directory: it holds {min(names)!r}. "
            "Give a new or an empty one, or that of a run."
        )
    return path


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid
    if owner != os.getuid():
        raise LaunchError(
            f"{path} belongs to another user (id {owner}), who could put there what this run "
            "would trust. Give a directory of your own with `--run`."
        )


def _members(place: Path) -> list[int]:
    try:
        with SharedCenter.open(place) as center:
            return center.members()
    except CenterError:
        return []
