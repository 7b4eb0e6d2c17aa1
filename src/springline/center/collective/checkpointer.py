"""Checkpoints of a center that no other process holds: written now and then, in the background."""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

from springline.center import checkpoint
from springline.center.layout import Bytes
from springline.center.locks import RecordLocks
from springline.center.plan import Plan
from springline.center.shared import CHECKPOINT_NAME
from springline.errors import CenterError, CheckpointError
from springline.files import write_text

Snapshot = Callable[[], tuple[Bytes, Bytes, int, list[int]]]  # center, state, version, steps
_OURS = 0  # the lock of the group that keeps checkpoints in a directory
_log = logging.getLogger("springline")


class Checkpointer:
    """Keeps the last checkpoints in a directory.

    Args:
        directory: is made if need be.
        plan: the center's.
        every: seconds between two checkpoints, counted from the end of one to the next.
    """

    def __init__(self, directory: Path, plan: Plan, every: float) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks = _alone_in(directory)
        except OSError as error:
            raise CheckpointError(
                f"Cannot keep checkpoints in {directory}: {error.strerror}. Give a directory that "
                "rank 0 may write to."
            ) from error
        self.path = directory / CHECKPOINT_NAME
        self._plan = plan
        self._every = every
        self._saved_at = time.monotonic()
        self._writing: threading.Thread | None = None

    def newest(self) -> Path | None:
        """Return the last good checkpoint."""
        return checkpoint.newest(self.path)

    def offer(self, snapshot: Snapshot) -> None:
        """Save in the background, if it is time and nothing is being written."""
        if self._writing is not None and self._writing.is_alive():
            return
        if time.monotonic() - self._saved_at >= self._every:
            # A daemon: a process that ends with an error does not wait for it. What is cut short
            # has a temporary name.
            taken = snapshot()
            self._writing = threading.Thread(target=self._write, args=taken, daemon=True)
            self._writing.start()

    def save(self, snapshot: Snapshot) -> None:
        """Save now."""
        self.wait()
        self._write(*snapshot())

    def wait(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            self._writing.join()

    def close(self) -> None:
        """Wait for what is being written, and let others keep theirs in the directory."""
        self.wait()
        locks, self._locks = self._locks, None
        if locks:
            locks.release(_OURS)
            locks.close()

    def _write(self, center: Bytes, state: Bytes, version: int, steps: list[int]) -> None:
        try:
            checkpoint.write(self.path, self._plan, center, state, version, steps)
        except CheckpointError as error:  # training goes on, and so does the one before
            _log.warning("%s", error)
        self._saved_at = time.monotonic()


def _alone_in(directory: Path) -> RecordLocks | None:
    """Take a directory for this group; None if its file system has no locks.

    Raises:
        CheckpointError: another group of this machine is at work there. One of another machine may
            be dead, though a network's file system has not noticed yet: then there is a warning.
    """
    locks, owner, here = RecordLocks(directory / "lock"), directory / "machine", platform.node()
    try:
        taken = locks.try_acquire(_OURS)
    except CenterError as error:
        locks.close()
        _log.warning("Two groups in %s would not notice each other: %s", directory, error)
        return None
    if taken:
        with contextlib.suppress(OSError):  # a write error is raised when it matters
            write_text(owner, here)
        return locks
    locks.close()
    where = owner.read_text("utf-8") if owner.exists() else here
    text = f"Another group keeps its checkpoints in {directory}, too, with its rank 0 on {where}"
    if where == here:
        raise CheckpointError(
            f"{text}. Wait until it has ended, or give another directory (SPRINGLINE_RUN)."
        )
    _log.warning("%s, unless that one is dead. If it is not, end one of the two.", text)
    return None
