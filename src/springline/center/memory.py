"""A center in memory that this process can write to: the exchange itself.

`merge` runs in the worker, shard by shard under the shard's lock (or without it, as Hogwild), and
block by block, so that a block is still in cache when it is merged and adopted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from springline.center import checkpoint
from springline.center.center import Center, Local, Member, Progress
from springline.center.errors import CenterError, NonFiniteError, RankError, SettingsError
from springline.center.layout import Bytes, Layout, Run, aligned_zeros
from springline.center.locks import CHECKPOINT, RANK, SHARD, Locks
from springline.center.plan import (
    BASE,
    CLOSED,
    EXCHANGES,
    NANOSECONDS,
    STARTED,
    STEPS,
    Memory,
    Plan,
)
from springline.center.rounds import Rounds
from springline.center.waiting import wait_until
from springline.rules.buffers import buffer_rule
from springline.rules.rule import CenterBlock, LocalBlock, Rule, is_finite


class MemoryCenter(Center):
    """Common to the in-process and the shared center."""

    asynchronous: ClassVar[bool] = True
    synchronous: ClassVar[bool] = True

    def __init__(self, plan: Plan, raw: Bytes, locks: Locks) -> None:
        self.plan = plan
        self.memory = Memory(plan, raw)
        self.locks = locks
        self._process = os.getpid()
        self._members: list[MemoryMember] = []

    @property
    def layout(self) -> Layout:
        """The model's layout."""
        return self.plan.layout

    @property
    def settings(self) -> dict[str, Any]:
        """What all its workers agree on."""
        return self.plan.settings

    @property
    def version(self) -> int:
        """Exchanges so far: one counter per rank, so that it cannot go back."""
        head = self.memory.head
        done = head[CLOSED] if self.plan.synchronous else self.memory.ranks[:, EXCHANGES].sum()
        return int(head[BASE] + done)

    def progress(self) -> list[Progress]:
        """Return how far each rank has come."""
        columns = self.memory.ranks[:, [STEPS, EXCHANGES, NANOSECONDS]].tolist()
        return [Progress(steps, exchanges, ns / 1e9) for steps, exchanges, ns in columns]

    def members(self) -> list[int]:
        """Return the ranks whose lock is held."""
        return [rank for rank in range(self.plan.workers) if self.locks.held(RANK + rank)]

    def shard_lock(self, shard: int) -> AbstractContextManager[None]:
        """Hold a shard's lock, if this center has locks."""
        return self.locks.hold(SHARD + shard) if self.plan.use_locking else nullcontext()

    def read(self, out: Bytes | None = None) -> Bytes:
        """Copy the center, consistent per shard, into a flat buffer."""
        self.check_process()
        out = self.layout.allocate() if out is None else out
        for k, shard in enumerate(self.plan.shards):
            with self.shard_lock(k):
                out[shard.start : shard.stop] = self.memory.center[shard.start : shard.stop]
        return out

    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> MemoryMember:
        """Become the worker of that rank."""
        self.check_process()
        use_locking = {"use_locking": self.plan.use_locking}  # the center's, whoever joins
        check_settings(self.settings, rule.settings() | use_locking)
        whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
        if not whole or not 0 <= rank < self.plan.workers:
            raise RankError(
                f"`rank` must be an integer from 0 to {self.plan.workers - 1}, since the run is "
                f"configured for {self.plan.workers} workers. Received: rank={rank!r}."
            )
        if not self.locks.take(RANK + rank):
            raise RankError(
                f"Rank {rank} is in use by a live worker. Give every worker a rank of its own; "
                f"in use: {self.members()}."
            )
        member = MemoryMember(self, rank, rule, timeout)
        self._members.append(member)
        return member

    def save(self, path: Path) -> None:
        """Write a checkpoint; two processes that save at once take turns."""
        self.check_process()
        center, state = self.layout.allocate(), np.empty_like(self.memory.state)
        version, steps = self.version, [rank.steps for rank in self.progress()]
        with self.locks.hold(CHECKPOINT):
            for k, shard in enumerate(self.plan.shards):
                with self.shard_lock(k):
                    center[shard.start : shard.stop] = self.memory.center[shard.start : shard.stop]
                    for s in self.plan.state:
                        if shard.start <= self.layout.entries[s.parameter].offset < shard.stop:
                            np.copyto(s.view(state), s.view(self.memory.state))
            checkpoint.write(path, self.plan, center, state, version, steps)

    def initialise(self, values: Mapping[str, Any]) -> None:
        """Give a new center its first values."""
        for entry in self.layout.entries:
            if not np.isfinite(values[entry.name]).all():
                raise NonFiniteError(
                    f"{entry.kind.capitalize()} {entry.name!r} has NaN or Inf, so no center was "
                    "made with it. Look at how the model is initialised or loaded."
                )
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

    def check_process(self) -> None:
        """Refuse to be used in a forked child, which holds none of the locks."""
        if os.getpid() != self._process:
            raise CenterError(
                f"This center was opened in process {self._process} and is used in its child "
                f"{os.getpid()}. Open it again in the child."
            )

    def forget(self, member: MemoryMember) -> None:
        """Give a member's rank back."""
        self._members.remove(member)
        self.locks.release(RANK + member.rank)


@dataclass(slots=True)
class Block:
    """The two sides of a block, and the rule for it."""

    run: Run
    rule: Rule
    local: LocalBlock
    center: CenterBlock


class MemoryMember(Member):
    """One worker's place at a center in memory."""

    def __init__(
        self, center: MemoryCenter, rank: int, rule: Rule, timeout: float | None = None
    ) -> None:
        self.rank = rank
        self.rule = rule
        self.timeout = timeout
        self.center = center
        self.row = center.memory.ranks[rank]
        self.start_step = int(self.row[STEPS])
        self._turn = threading.Lock()
        self._left = False
        self._bound: Local | None = None
        self._shards: list[list[Block]] = []
        self._rounds = Rounds(center, self) if rule.synchronous else None
        if self._rounds:
            self._rounds.enter()

    def exchange(self, local: Local) -> None:
        """Exchange with the center; two threads of a worker take turns."""
        with self._turn:
            self.center.check_process()
            if self._left:
                raise CenterError(f"Rank {self.rank} has left the center; join again to exchange.")
            start = time.perf_counter_ns()
            if local is not self._bound:
                self._bind(local)
            try:
                with np.errstate(over="raise", invalid="raise", divide="raise"):
                    if self._rounds:
                        self._rounds.exchange(self._shards, local)
                    else:
                        self._exchange(local)
            finally:
                local.forget_gradients()
            self.row[STEPS] = local.steps
            self.row[NANOSECONDS] += time.perf_counter_ns() - start
            self.row[EXCHANGES] += 1

    def barrier(self) -> None:
        """Wait until all ranks are held at once, or have been before."""
        head, workers = self.center.memory.head, self.center.plan.workers

        def done() -> bool:
            if not head[STARTED] and len(self.center.members()) == workers:
                head[STARTED] = 1
            return bool(head[STARTED])

        def missing() -> set[int]:
            return set(range(workers)) - set(self.center.members())

        wait_until(done, missing, self.timeout, "all workers to start")

    def leave(self) -> None:
        """Give the rank back, once."""
        with self._turn:
            if not self._left and os.getpid() == self.center._process:
                self._left = True
                self.center.forget(self)

    def _exchange(self, local: Local) -> None:
        for k, blocks in enumerate(self._shards):
            with self.center.shard_lock(k):
                for block in blocks:
                    self.swap(block, local)

    def swap(self, block: Block, local: Local) -> None:
        """Contribute, merge and adopt one block."""
        rule, mine, ours, entry = block.rule, block.local, block.center, block.run.entry
        if entry is None or local.seen[entry]:
            message = self.message(block, local)
            if block.run.opens and rule.outer:
                rule.outer.advance(ours.state)
            try:
                rule.merge(ours, (message,), 0.0 if entry is None else float(local.rates[entry]))
            except FloatingPointError as error:
                raise self.non_finite(block, message) from error
        else:
            message = mine.x  # no gradient since the last exchange: nothing to merge
        rule.adopt(mine, message, ours.c)

    def message(self, block: Block, local: Local) -> NDArray[Any]:
        """Return a block's message, which is finite."""
        try:
            message = block.rule.contribute(block.local, block.center.c, local.gradients)
        except FloatingPointError as error:
            raise self.non_finite(block, block.local.message) from error
        if not is_finite(message):
            raise self.non_finite(block, message)
        return message

    def non_finite(self, block: Block, message: NDArray[Any]) -> NonFiniteError:
        """Return the error for a block that has no finite message."""
        layout, run = self.center.layout, block.run
        if run.entry is not None:
            name = layout.entries[run.entry].name
        else:
            first = int(np.argmin(np.isfinite(message)))
            name = layout.name_at(run.start + first * message.itemsize)
        return NonFiniteError(
            f"{run.kind.capitalize()} {name!r} of rank {self.rank} has NaN or Inf (or would "
            "overflow the center), so it was not sent. Lower the learning rate, clip the "
            "gradients, or take the center again and go on from there."
        )

    def _bind(self, local: Local) -> None:
        plan, memory = self.center.plan, self.center.memory
        state = memory.state_of(plan)
        elementwise = self.rule.outer is None or self.rule.outer.elementwise
        rules = {"parameter": self.rule, "buffer": buffer_rule(self.rule)}
        runs = [list(plan.layout.blocks(s, plan.whole, elementwise)) for s in plan.shards]
        longest = max((run.stop - run.start for shard in runs for run in shard), default=0)
        message, work = aligned_zeros(longest), aligned_zeros(longest)

        def bind(run: Run) -> Block:
            room = Run(0, run.stop - run.start, run.dtype, run.kind)
            entry = None if run.entry is None else plan.layout.entries[run.entry]
            shape = (-1,) if entry is None or elementwise else entry.shape
            arrays = {} if run.entry is None else state.get(run.entry, {})
            if entry and elementwise:
                start = (run.start - entry.offset) // np.dtype(run.dtype).itemsize
                part = slice(start, start + room.view(work).size)
                arrays = {
                    key: array.reshape(-1)[part] if array.shape == entry.shape else array
                    for key, array in arrays.items()
                }

            def view(buffer: Bytes, run: Run = run) -> NDArray[Any]:
                return run.view(buffer).reshape(shape)

            mine = LocalBlock(
                view(local.x),
                view(message, room),
                copy=None if local.copy is None else view(local.copy),
            )
            if local.a is not None:
                mine.a = view(local.a)
            ours = CenterBlock(
                view(memory.center), view(work, room), arrays, entry.name if entry else ""
            )
            return Block(run, rules[run.kind], mine, ours)

        self._shards = [[bind(run) for run in shard] for shard in runs]
        self._bound = local


def check_settings(center: dict[str, Any], worker: dict[str, Any]) -> None:
    """Refuse a worker whose rule or settings differ from the center's; name the difference."""
    for key in [*center, *(k for k in worker if k not in center)]:
        ours, its = center.get(key), worker.get(key)
        if ours != its:
            raise SettingsError(
                f"The center was made with {key}={ours!r}, this worker comes with {key}={its!r}. "
                "Start it with the center's settings, or a new run."
            )
