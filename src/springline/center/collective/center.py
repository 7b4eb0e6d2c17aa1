"""Rounds over `torch.distributed`: the center is on every rank, the same to the bit.

An exchange is a round in which every rank of the group takes part: one all-reduce of one flat
buffer (one for each stretch of one dtype, where a model mixes float64 and float32), after which
every rank has the mean of the messages and takes the same step. Elastic averaging is then the
paper's synchronous form, with the `c` from before the round on every rank::

    x ← x − α(x − c)      c ← c + α Σ(xᵢ − c)

A process group cannot shrink: a rank that has NaN, or has finished, contributes nothing and is
not counted, but takes part until all have finished.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from springline.center import checkpoint
from springline.center.center import Center, Progress, check_finite
from springline.center.collective.checkpointer import Checkpointer
from springline.center.collective.group import Group
from springline.center.collective.member import CollectiveMember
from springline.center.collective.replica import RankReport, Replica
from springline.center.collective.start import agree, check_goes_on, check_workers
from springline.center.layout import Bytes, Layout
from springline.center.plan import Plan
from springline.checks import is_number
from springline.errors import RankError
from springline.rules.rule import Rule

SAVE_EVERY = 30.0
_log = logging.getLogger("springline")


class CollectiveCenter(Center):
    """A center that is on every rank of a process group; `Collective` makes it.

    Args:
        group: the ranks; all of them make the center at once.
        layout: the model's, the same on all ranks.
        rule: the same on all ranks.
        values: the first values, by name; rank 0's are taken by all.
        directory: where rank 0 keeps checkpoints; if it has one, all go on from there.
        save_every: seconds between two of them.
        restore: a checkpoint that rank 0 takes the first values from, if the directory has none.
    """

    in_a_child = "The child is not part of the process group."

    def __init__(
        self,
        group: Group,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        directory: Path | None = None,
        save_every: float = SAVE_EVERY,
        restore: Path | None = None,
    ) -> None:
        self.group = group
        self.process = os.getpid()
        self.member: CollectiveMember | None = None
        self.turn = threading.RLock()  # held while `c` is copied or changes its place
        self._exchanges = [0] * group.size
        self._checkpointer: Checkpointer | None = None
        try:
            self._start(layout, rule, values, directory, save_every, restore)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Rounds that had contributors."""
        return self._version

    def members(self) -> list[int]:
        """Return the ranks that had not finished in the last round."""
        gone = self.member is None or self.member.left
        here = [rank for rank, row in enumerate(self.rows) if not row.finished]
        return [rank for rank in here if not (gone and rank == self.group.rank)]

    def finished(self) -> list[int]:
        """Return the ranks that had finished in the last round."""
        return [rank for rank, row in enumerate(self.rows) if row.finished]

    def progress(self) -> list[Progress]:
        """Return how far each rank had come in the last round."""
        return [
            Progress(row.steps, exchanges, row.seconds)
            for row, exchanges in zip(self.rows, self._exchanges, strict=True)
        ]

    def read(self, out: Bytes | None = None) -> Bytes:
        """Copy the center, all of one round, into a flat buffer."""
        self.check_process()
        out = self.layout.allocate() if out is None else out
        with self.turn:
            np.copyto(out, self.replica.center)
        return out

    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> CollectiveMember:
        """Become the worker of this process's rank; the group has its timeout already."""
        self.check_join(rank, rule, timeout)
        if rank != self.group.rank:
            raise RankError(
                f"This process is rank {self.group.rank} of the {self.group.size} in its process "
                f"group. Received: rank={rank!r}."
            )
        if self.member is not None:
            raise RankError(f"Rank {rank} has joined already. A process has one worker per group.")
        self.member = CollectiveMember(self, rule)
        return self.member

    def save(self, path: str | Path) -> None:
        """Write a checkpoint. Every rank has the center, so that any of them can."""
        checkpoint.write(Path(path), self.plan, *self._snapshot())

    def close(self) -> None:
        """Release the group. Unlike `leave` it does not wait, and other ranks may fail."""
        if self.member is not None:
            self.member.left = True
        if self._checkpointer is not None and os.getpid() == self.process:
            self._checkpointer.close()
        self.group.close()

    def take_values(self, values: Bytes | None) -> None:
        """Take rank 0's values for `c`, on all ranks; the others may give none."""
        self._take(self.layout.allocate() if values is None else values, self.replica.center)

    def _take(self, values: Bytes, into: Bytes) -> None:
        """Write rank 0's values into a buffer of every rank."""
        tensor = torch.from_numpy(values.copy()).to(self.group.device)
        self.group.broadcast(tensor)
        with self.turn:
            np.copyto(into, tensor.cpu().numpy())

    def close_round(self, rows: Sequence[RankReport], changed: bool) -> None:
        """Count the round, if it changed `c`, and take what the ranks report."""
        contributed = [changed and row.contributes for row in rows]
        self._version += any(contributed)
        self._exchanges = [n + c for n, c in zip(self._exchanges, contributed, strict=True)]
        self.rows = list(rows)

    def offer_save(self) -> None:
        """Write a checkpoint, if the last is old."""
        if self._checkpointer is not None:
            self._checkpointer.offer(self._snapshot)

    def save_last(self) -> None:
        """Write the last checkpoint, when all have finished."""
        if self._checkpointer is not None:
            self._checkpointer.save(self._snapshot)
            self._checkpointer.close()

    def _snapshot(self) -> tuple[Bytes, Bytes, int, list[int]]:
        self.check_process()
        with self.turn:
            state = self.replica.state.copy()
            return self.read(), state, self._version, [row.steps for row in self.rows]

    def _start(
        self,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        directory: Path | None,
        save_every: float,
        restore: Path | None,
    ) -> None:
        """Agree with all other ranks, and take rank 0's values."""
        center = layout.allocate()

        def prepare() -> dict[str, Any]:
            check_workers(rule, self.group.size)
            self.plan = Plan.of(layout, rule, use_locking=True, rounds=True)
            self.replica = Replica(self.plan, self.group.size, self.group.device)
            layout.write(center, values)
            return {} if self.group.rank else self._first(center, directory, save_every, restore)

        first = agree(self.group, layout, rule, prepare)
        self.take_values(center)
        if self.plan.state:
            self._take(self.replica.state, self.replica.state)
        self._version: int = first["version"]
        self.sealed = int(self._version > 0)  # how; see `Member.seal`
        steps: list[int] = first["steps"]
        more = [max(steps, default=0)] * (self.group.size - len(steps))  # ranks that are new
        self.rows = [
            RankReport(False, False, False, 0.0, n) for n in [*steps, *more][: self.group.size]
        ]

    def _first(
        self, center: Bytes, directory: Path | None, save_every: float, restore: Path | None
    ) -> dict[str, Any]:
        """Put the first values into `center`, on rank 0; return the version and the steps."""
        saved = restore
        if directory is not None:
            self._checkpointer = Checkpointer(directory, self.plan, save_every)
            own = self._checkpointer.newest()
            if own is not None:
                check_goes_on(checkpoint.describe(own).settings, self.settings)
            saved = own or restore
        if saved is None:
            check_finite(self.layout, self.layout.views(center))
            return {"version": 0, "steps": [0] * self.group.size}
        found = checkpoint.read(saved, self.plan, center, self.replica.state)
        _log.warning("Going on from %s, version %d.", saved, found.version)
        return {"version": found.version, "steps": found.steps}


@dataclass(frozen=True)
class Collective:
    """A process group as the place of a center, for `center=` of an optimizer or a worker.

    Args:
        group: a `torch.distributed` process group, for instance `torch.distributed.group.WORLD`.
        directory: where rank 0 keeps checkpoints, from which a restarted group goes on; only rank 0
            needs to see it. None for no checkpoints.
        save_every: seconds between two of them, so that at most these are lost.
    """

    group: Any
    directory: str | Path | None = None
    save_every: float = SAVE_EVERY

    def __post_init__(self) -> None:
        if not hasattr(self.group, "allreduce"):
            raise TypeError(
                "`group` must be a process group that this process is in; call "
                "`torch.distributed.init_process_group()` first. "
                f"Received: {type(self.group).__name__} {self.group!r}."
            )
        if not self.save_every >= 0:
            raise ValueError(
                f"`save_every` must be seconds >= 0. Received: save_every={self.save_every!r}."
            )

    def __call__(
        self, layout: Layout, rule: Rule, values: Mapping[str, Any], timeout: float | None = None
    ) -> CollectiveCenter:
        """Make the center; all ranks of the group must."""
        if timeout is not None and not (is_number(timeout) and timeout > 0):
            raise ValueError(f"`timeout` must be seconds > 0, or None. Received: {timeout!r}.")
        directory = None if self.directory is None else Path(self.directory)
        group = Group(self.group, timeout)
        return CollectiveCenter(group, layout, rule, values, directory, self.save_every)
