"""A center that all processes of one machine share: a directory, no server.

    DIR/layout.json              what the center is and where its memory is; made last
    DIR/lock                     record locks on its bytes: shards, ranks, rounds
    DIR/checkpoint.safetensors   the last checkpoint, and the one before it beside it
    memory                       a mapped file, in a tmpfs if one has room, else in DIR

The mapped file outlives every process. Should it be lost all the same (the machine restarted), or
be that of another directory (this one is a copy), the next worker to join goes on from the last
checkpoint. A launcher keeps its run's center: no other process makes new memory for it
meanwhile, and what is removed of it can be put back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from springline.center import checkpoint
from springline.center.center import check_plan
from springline.center.directory import (
    LAYOUT_NAME,
    check_platform,
    claim,
    no_checkpoint,
    open_locks,
    read_layout,
    write_layout,
)
from springline.center.first_values import FirstValues
from springline.center.layout import Bytes, Layout
from springline.center.locks import CREATE, KEEPER, RANK, RecordLocks
from springline.center.member import MemoryMember
from springline.center.memory import MemoryCenter
from springline.center.memory_file import adopt, belongs, free, map_memory, new_memory
from springline.center.plan import ENDS, SEALED, Plan
from springline.center.segments import in_use, sweep
from springline.center.waiting import is_alive
from springline.errors import CenterError
from springline.rules.rule import Rule

CHECKPOINT_NAME = "checkpoint.safetensors"
_log = logging.getLogger("springline")


class SharedCenter(MemoryCenter):
    """A center in a directory. Make one with `create_or_join` or `open`."""

    def __init__(
        self, directory: Path, plan: Plan, path: Path, raw: Bytes, locks: RecordLocks
    ) -> None:
        super().__init__(plan, raw, locks)
        self.directory = directory
        self._path = path
        self._record_locks = locks
        locks.holders = self.memory.holders
        self._kept = False

    @classmethod
    def create_or_join(
        cls,
        directory: str | Path,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        *,
        use_locking: bool = True,
        restore: str | Path | None = None,
        first: FirstValues | None = None,
        timeout: float | None = None,
    ) -> SharedCenter:
        """Open the center in a directory, which the first worker makes.

        Args:
            directory: new, empty or a center's own.
            layout: the worker's model; refused if it is not the center's.
            rule: the worker's; refused if it is not the center's.
            values: the first values, by name. Only the one that makes the center gives them; all
                others take the center's.
            use_locking: whether an exchange is atomic, per part of the center.
            restore: a checkpoint whose values a new center takes instead.
            first: a file whose values it takes instead, for good: those that a worker has loaded do
                not replace them.
            timeout: seconds after which waiting for one that others are making fails.
        """
        directory = claim(Path(directory))
        plan = Plan.of(layout, rule, use_locking)
        locks = open_locks(directory)
        try:
            with locks.acquire(CREATE, timeout):
                found = read_layout(directory)
                if found is None or not belongs(found[1], directory):
                    _check_unused(directory, plan, locks)
                if found is None:
                    with cls._new(directory, plan, locks) as center:
                        center.initialise(first.read(layout) if first else values)
                        if first:
                            center.memory.head[SEALED] = 1
                        if restore:
                            center.restore(Path(restore))
                else:
                    existing, path = found
                    if belongs(path, directory):
                        adopt(path, directory)
                        raw = map_memory(path, existing.nbytes)
                        center = cls(directory, existing, path, raw, locks)
                    else:
                        center = cls._recover(directory, existing, path, locks)
                    check_plan(center.plan, plan)
                    center._report_whose_values(values)
        except BaseException:
            locks.close()
            raise
        return center

    @classmethod
    def open(cls, directory: str | Path, timeout: float | None = None) -> SharedCenter:
        """Open a center that is there, whatever its model: to read, to save, to watch.

        Args:
            directory: the center's.
            timeout: seconds after which waiting for a part that others have locked fails.
        """
        directory = Path(directory)
        check_platform()
        found = read_layout(directory)
        if found is None:
            raise CenterError(f"There is no center in {directory}. Start a run there first.")
        plan, path = found
        with contextlib.suppress(FileNotFoundError):
            if belongs(path, directory):
                raw = map_memory(path, plan.nbytes)
                center = cls(directory, plan, path, raw, open_locks(directory))
                center.timeout = timeout
                return center
        saved = checkpoint.newest(directory / CHECKPOINT_NAME, whole=False)
        if saved is None:
            raise no_checkpoint(directory, path)
        raise CenterError(
            f"The center in {directory} is not in memory. Its last checkpoint is {saved}."
        )

    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> MemoryMember:
        """Become the worker of that rank."""
        self.check_process()
        with self.locks.acquire(CREATE, timeout):
            self.check_current()
            return super().join(rank, rule, timeout)

    def save(self, path: str | Path | None = None) -> None:
        """Write a checkpoint, by default the directory's own."""
        super().save(Path(path or self.directory / CHECKPOINT_NAME))

    def check_current(self) -> None:
        """Refuse a center whose directory has other memory now, or none."""
        if self._kept:
            return
        found = read_layout(self.directory)
        if found is None or found[1] != self._path or not belongs(self._path, self.directory):
            raise CenterError(f"The center in {self.directory} was retired; open it again.")

    def keep(self) -> None:
        """Keep the center until it is closed: no process makes new memory for it, or frees it."""
        with self.locks.acquire(CREATE, self.timeout):
            self.check_current()
            self._kept = self.locks.try_acquire(KEEPER)

    def move(self, directory: Path) -> None:
        """Take note of where the center's directory is now."""
        if self._path.parent == self.directory:
            self._path = directory / self._path.name
        self.directory = directory

    def put_back(self) -> str | None:
        """Put back what the directory has lost of a center that we keep.

        Returns:
            What was lost, in words.

        Raises:
            CenterError: the directory has another center, with memory of its own.
        """
        layout = self.directory / LAYOUT_NAME
        try:
            found = read_layout(self.directory)
        except CenterError:
            found, lost = None, f"{layout} was damaged"
        else:
            lost = f"{layout} was removed"
        if found and found[1] == self._path:
            return None if self._path.exists() else f"{self._path} was removed"
        if found and belongs(found[1], self.directory):
            raise CenterError(f"Another center was made in {self.directory}.")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._publish()
        return f"{layout} was replaced by another center's" if found else lost

    def retire(self) -> None:
        """Save a checkpoint and free the memory, as soon as no process maps it any more.

        The next worker to create or join a center in the directory goes on from the checkpoint. The
        memory of a center that a launcher keeps is freed by the launcher, when the run ends.
        """
        self.check_process()
        with self.locks.acquire(CREATE, self.timeout):
            if self.members():
                raise CenterError(f"Workers are still members: ranks {self.members()}.")
            self.save()
            if not self.locks.held_elsewhere(KEEPER):
                free(self._path, self.directory)
        self.close()

    def retire_at_exit(self, rank: int) -> None:
        """Retire the center if this is the last process of its workers; never fails.

        One whose worker has finished may still read the center, so all must be about to end. If a
        launcher keeps the center, it is left to that.
        """
        if self.closed or os.getpid() != self.process:
            return
        try:
            with self.locks.acquire(CREATE, self.timeout):
                ranks = self.memory.ranks
                ranks[rank, ENDS] = 1
                others = [r for r in range(self.plan.workers) if not ranks[r, ENDS]]
                last = not any(is_alive(self._record_locks.last_holder(RANK + r)) for r in others)
            if last and not self.members() and not self.locks.held_elsewhere(KEEPER):
                self.retire()
        except (CenterError, OSError) as error:
            if self._path.exists():  # else another one was the last
                _log.warning("The center in %s stays in memory: %s", self.directory, error)

    def close(self) -> None:
        """Leave, and close the lock file of this process."""
        if not self.closed and os.getpid() == self.process:
            self.closed = True
            super().close()
            if self._kept:
                self.locks.release(KEEPER)
            self._record_locks.close()

    @classmethod
    @contextlib.contextmanager
    def _new(cls, directory: Path, plan: Plan, locks: RecordLocks) -> Iterator[SharedCenter]:
        """Make a center's memory; what fills it decides whether the center comes to be."""
        sweep()
        path, raw = new_memory(directory, plan.nbytes)
        try:
            center = cls(directory, plan, path, raw, locks)
            yield center
            center._publish()
        except BaseException:
            free(path, directory)
            raise

    def _publish(self) -> None:
        """Write the file that makes the center be there: atomically, when all else is."""
        write_layout(self.directory, self.plan, self._path)

    @classmethod
    def _recover(cls, directory: Path, plan: Plan, path: Path, locks: RecordLocks) -> SharedCenter:
        saved = checkpoint.newest(directory / CHECKPOINT_NAME)
        if saved is None:
            raise no_checkpoint(directory, path)
        with cls._new(directory, plan, locks) as center:
            center.restore(saved)
        why = f"{directory} is a copy" if path.exists() else "The center's memory was gone"
        _log.warning("%s; going on from %s, version %d.", why, saved, center.version)
        return center

    def _report_whose_values(self, values: Mapping[str, Any]) -> None:
        ours = self.layout.views(self.memory.center)
        if any(not np.array_equal(ours[n], v) for n, v in values.items() if n in ours):
            _log.log(
                logging.INFO if self.sealed else logging.WARNING,
                "Joined the center in %s at version %d: its values replace this worker's own. Give "
                "all workers the same: the same seed, or the same weights to load.",
                self.directory,
                self.version,
            )


def _check_unused(directory: Path, plan: Plan, locks: RecordLocks) -> None:
    """Refuse to make new memory for a center while its old memory is in use."""
    ranks = [rank for rank in range(plan.workers) if locks.held(RANK + rank)]
    if ranks or locks.held(KEEPER) or in_use(directory):
        raise CenterError(
            f"The center in {directory} has members but its memory is not on this machine "
            f"({socket.gethostname()}): it was removed, or they are on another one, and a shared "
            "center is for one machine. End the run, then start it again."
        )
