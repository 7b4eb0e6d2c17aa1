"""Centers in memory that this process can write to: steps run in the workers themselves."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from springline.center import checkpoint
from springline.center.blocks import point_of
from springline.center.center import Center, Progress, check_finite
from springline.center.journal import Journal
from springline.center.layout import Bytes, Layout, aligned_zeros
from springline.center.locks import CHECKPOINT, RANK, SHARD, Locks, ThreadLocks
from springline.center.member import MemoryMember
from springline.center.plan import (
    BASE,
    CLOSED,
    CONTRIBUTED,
    EXCHANGES,
    FINISHED,
    JOINED,
    LAST,
    LEFT_OUT,
    NANOSECONDS,
    SEALED,
    SENT,
    STEPS,
    Memory,
    Plan,
)
from springline.center.state import arrays_of
from springline.center.verbs import put
from springline.center.waiting import describe_rank, is_alive
from springline.errors import rank_in_use
from springline.rules.rule import Rule
from springline.signals import deferred

_FORKED = 5.0  # seconds that a forked child may take to run


class MemoryCenter(Center):
    """Common to the in-process and the shared center."""

    def __init__(self, plan: Plan, raw: Bytes, locks: Locks) -> None:
        self.plan = plan
        self.memory = Memory(plan, raw)
        self.journal = Journal(plan, self.memory) if plan.journaled else None
        self.locks = locks
        self.process = os.getpid()
        self.timeout: float | None = None  # seconds to wait for a lock
        self._members: list[MemoryMember] = []

    @property
    def version(self) -> int:
        """Exchanges so far: one counter per rank, so that it cannot go back."""
        head = self.memory.head
        done = head[CLOSED] if self.plan.rounds else self.memory.ranks[:, EXCHANGES].sum()
        return int(head[BASE] + done)

    def progress(self) -> list[Progress]:
        """Return how far each rank has come, as far as it is in the center."""
        ranks = self.memory.ranks
        last = self._version_in_place() - int(self.memory.head[BASE]) if self.plan.rounds else 0
        counted = (ranks[:, CONTRIBUTED] > 0) & (ranks[:, CONTRIBUTED] <= last)
        # A worker that was killed after its round was closed has not written its steps.
        steps = np.where(counted, np.maximum(ranks[:, STEPS], ranks[:, SENT]), ranks[:, STEPS])
        columns = zip(steps.tolist(), ranks[:, [EXCHANGES, NANOSECONDS]].tolist(), strict=True)
        return [Progress(n, exchanges, ns / 1e9) for n, (exchanges, ns) in columns]

    def members(self) -> list[int]:
        """Return the ranks whose lock is held."""
        self.check_process()
        return [rank for rank in range(self.plan.workers) if self.locks.held(RANK + rank)]

    def finished(self) -> list[int]:
        """Return the ranks that have made all their steps and left for good."""
        return [int(rank) for rank in np.flatnonzero(self.memory.ranks[:, JOINED] == FINISHED)]

    @property
    def left_out(self) -> int:
        """How many parts exchanges have left out, since others kept them locked."""
        return int(self.memory.ranks[:, LEFT_OUT].sum())

    @property
    def sealed(self) -> int:
        """How the center was sealed: a mark, or 1 if that is not known; 0 if it is not."""
        return int(self.memory.head[SEALED]) or int(self.version > 0)

    @contextlib.contextmanager
    def shard_lock(self, shard: int) -> Iterator[None]:
        """Hold a shard's lock, if this center has locks."""
        if not self.plan.use_locking:
            yield
            return
        with self.locks.acquire(SHARD + shard, self.timeout):
            self._finish(shard)
            yield

    def try_acquire_shard(self, shard: int) -> bool:
        """Acquire a shard's lock, if it is free or this center has none."""
        if not self.plan.use_locking:
            return True
        if not self.locks.try_acquire(SHARD + shard):
            return False
        self._finish(shard)
        return True

    def release_shard(self, shard: int) -> None:
        """Release a shard's lock."""
        if self.plan.use_locking:
            self.locks.release(SHARD + shard)

    def _finish(self, shard: int) -> None:
        if self.journal:
            self.journal.finish(shard)

    def who(self, rank: int) -> str:
        """Return a rank, and what its process is doing."""
        process, last = self.locks.holder(RANK + rank), int(self.memory.ranks[rank, LAST])
        if process is None:
            return f"rank {rank} (not there)"
        ago = f", no exchange for {max(0.0, time.monotonic() - last):.0f} s" if last else ""
        return describe_rank(rank, process, ago)

    def read(self, out: Bytes | None = None) -> Bytes:
        """Copy the center, consistent per shard, into a flat buffer."""
        self.check_process()
        out = self.layout.allocate() if out is None else out
        self._copy(out)
        return out

    def _copy(self, center: Bytes, state: Bytes | None = None) -> None:
        """Copy the center, and the outer optimizer's state with it, shard by shard."""
        ours = {} if state is None else arrays_of(self.plan.state, state)
        theirs = {} if state is None else self.memory.state_of(self.plan)
        for k, shard in enumerate(self.plan.shards):
            blocks = self.plan.blocks(shard)
            with self.shard_lock(k):
                for block in blocks:  # a parameter may lie in several shards
                    now = point_of(self.plan, block, self.memory.center, theirs)
                    put(now, point_of(self.plan, block, center, ours))

    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> MemoryMember:
        """Become the worker of that rank."""
        self.check_process()
        self.check_join(rank, rule, timeout)
        self.timeout = timeout if self.timeout is None else self.timeout
        with deferred():
            if not self._acquire_rank(RANK + rank):
                raise rank_in_use(rank, self.members())
            try:
                member = MemoryMember(self, int(rank), rule, timeout)
            except BaseException:
                self.locks.release(RANK + rank)
                raise
            self._members.append(member)
            return member

    def _acquire_rank(self, number: int) -> bool:
        """Acquire a rank's lock, if it is free.

        A process that was killed while it forked has left it to its child, which closes it as the
        first thing that it does.
        """
        deadline = time.monotonic() + _FORKED
        while not self.locks.try_acquire(number):
            holder = self.locks.holder(number)
            if is_alive(holder) or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def save(self, path: str | Path) -> None:
        """Write a checkpoint; two processes that save at once take turns."""
        self.check_process()
        center, state = self.layout.allocate(), np.zeros_like(self.memory.state)
        with self.locks.acquire(CHECKPOINT, self.timeout):
            self.check_current()
            version, steps = self._version_in_place(), [rank.steps for rank in self.progress()]
            self._copy(center, state)
            checkpoint.write(Path(path), self.plan, center, state, version, steps)

    def _version_in_place(self) -> int:
        """Return the last version that every shard holds: a round may be half reduced."""
        last, shards = self.version, self.plan.fragments
        if not self.plan.rounds or last == self.memory.head[BASE]:
            return last
        here = list(shards[(last - 1) % len(shards)])  # of the last round's fragment
        closed = last - self.memory.head[BASE]
        return last if (self.memory.reduced[here] >= closed).all() else last - 1

    def check_current(self) -> None:
        """Refuse to save a center that another has taken the place of."""

    def initialise(self, values: Mapping[str, Any]) -> None:
        """Give a new center its first values."""
        check_finite(self.layout, values)
        self.layout.write(self.memory.center, values)
        for s in self.plan.state:
            s.view(self.memory.state).fill(s.first)

    def restore(self, path: Path) -> None:
        """Give a new center the values of a checkpoint."""
        saved = checkpoint.read(path, self.plan, self.memory.center, self.memory.state)
        self.memory.head[BASE] = saved.version
        if len(saved.steps) == self.plan.workers:  # else it is the start of another run
            self.memory.ranks[:, STEPS] = saved.steps

    def close(self) -> None:
        """Leave, with all members that joined through this object."""
        for member in list(self._members):
            member.leave()

    def forget(self, member: MemoryMember) -> None:
        """Give a member's rank back, once."""
        if member in self._members:
            self._members.remove(member)
            self.locks.release(RANK + member.rank)


class LocalCenter(MemoryCenter):
    """A center in one process: for a script that runs alone, and for workers that are threads.

    Args:
        layout: the model's.
        rule: what its workers will do.
        values: the center's first values, by name.
        use_locking: whether an exchange is atomic, per part of the center.
        restore: a checkpoint to take the first values from, instead of `values`.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        *,
        use_locking: bool = True,
        restore: Path | None = None,
    ) -> None:
        plan = Plan.of(layout, rule, use_locking)
        super().__init__(plan, aligned_zeros(plan.nbytes), ThreadLocks())
        self.initialise(values)
        if restore:
            self.restore(restore)
