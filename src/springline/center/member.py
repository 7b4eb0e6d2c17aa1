"""One worker's place at a center in memory: the exchange itself.

`merge` runs in the worker, shard by shard under the shard's lock (or without it, as Hogwild), and
block by block, so that a block is still in cache when it is merged and adopted.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from springline.center.center import Local, Member
from springline.center.errors import CenterError, NonFiniteError
from springline.center.layout import Bytes, Run, aligned_zeros
from springline.center.plan import EXCHANGES, JOINED, NANOSECONDS, STARTED, STEPS
from springline.center.rounds import Rounds
from springline.center.waiting import wait_until
from springline.rules.buffers import buffer_rule
from springline.rules.rule import CenterBlock, LocalBlock, Rule, size

if TYPE_CHECKING:
    from springline.center.memory import MemoryCenter


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
        self.row[JOINED] = 0  # until we are in the rounds, too
        self.start_step = int(self.row[STEPS])
        self._turn = threading.RLock()  # a signal handler may leave in the middle of an exchange
        self._busy = False
        self.left = False
        self._bound: Local | None = None
        self._shards: list[list[Block]] = []
        self._centers = self._bind_center()
        self._rounds = Rounds(center, self) if rule.synchronous else None
        if self._rounds:
            self._rounds.enter(self._centers)
        self.row[JOINED] = 1

    def exchange(self, local: Local) -> None:
        """Exchange with the center; two threads of a worker take turns."""
        with self._turn:
            self.check_here()
            if self._busy:
                raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
            start = time.perf_counter_ns()
            if local is not self._bound:
                self._bind(local)
            try:
                self._busy = True
                with np.errstate(over="raise", invalid="raise", divide="raise"):
                    if self._rounds:
                        self._rounds.exchange(self._shards, local)
                    else:
                        self._exchange(local)
            finally:
                self._busy = False
                local.forget_gradients()
            self.row[STEPS] = local.steps
            self.row[NANOSECONDS] += time.perf_counter_ns() - start
            self.row[EXCHANGES] += 1

    def barrier(self) -> None:
        """Wait until all ranks have joined and are there at once, or have been before."""
        head, ranks = self.center.memory.head, self.center.memory.ranks

        def missing() -> set[int]:
            here = {rank for rank in self.center.members() if ranks[rank, JOINED]}
            return set(range(self.center.plan.workers)) - here

        def done() -> bool:
            if not head[STARTED] and not missing():
                head[STARTED] = 1
            return bool(head[STARTED])

        wait_until(done, missing, self.timeout, "all workers to start")

    def leave(self) -> None:
        """Give the rank back, once. An exchange that waits for others ends with an error."""
        if self.left or os.getpid() != self.center._process:
            return
        self.left = True
        with self._turn:
            self.center.forget(self)

    def check_here(self) -> None:
        """Refuse to exchange when no longer a member."""
        if self.left:
            raise CenterError(f"Rank {self.rank} has left the center; join again to exchange.")
        self.center.check_process()

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
            ours.large = mine.large
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
        square = size(message)
        if math.isnan(square):
            raise self.non_finite(block, message)
        block.local.large = square == math.inf
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

    @property
    def _elementwise(self) -> bool:
        return self.rule.outer is None or self.rule.outer.elementwise

    def _bind_center(self) -> list[list[tuple[Run, Rule, CenterBlock]]]:
        """Cut the center into shards and blocks."""
        plan, memory = self.center.plan, self.center.memory
        state = memory.state_of(plan)
        rules = {"parameter": self.rule, "buffer": buffer_rule(self.rule)}
        runs = [list(plan.layout.blocks(s, plan.whole, self._elementwise)) for s in plan.shards]
        longest = max((run.stop - run.start for shard in runs for run in shard), default=0)
        self._room = aligned_zeros(longest)
        work = aligned_zeros(longest)

        def bind(run: Run) -> tuple[Run, Rule, CenterBlock]:
            entry = None if run.entry is None else plan.layout.entries[run.entry]
            arrays = {} if run.entry is None else state.get(run.entry, {})
            if entry and self._elementwise:
                start = (run.start - entry.offset) // np.dtype(run.dtype).itemsize
                part = slice(start, start + run.view(memory.center).size)
                arrays = {
                    key: array.reshape(-1)[part] if array.shape == entry.shape else array
                    for key, array in arrays.items()
                }
            c, room = self._shaped(run, memory.center), self._shaped(run, work, room=True)
            return run, rules[run.kind], CenterBlock(c, room, arrays, entry.name if entry else "")

        return [[bind(run) for run in shard] for shard in runs]

    def _shaped(self, run: Run, buffer: Bytes, room: bool = False) -> NDArray[Any]:
        """Return a block's part of a buffer, or of scratch: flat, or in its own shape."""
        part = replace(run, start=0, stop=run.stop - run.start) if room else run
        flat = part.view(buffer)
        if run.entry is None or self._elementwise:
            return flat
        return flat.reshape(self.center.layout.entries[run.entry].shape)

    def _bind(self, local: Local) -> None:
        """Lay the worker's buffers beside the center's blocks."""

        def bind(run: Run, rule: Rule, center: CenterBlock) -> Block:
            mine = LocalBlock(self._shaped(run, local.x), self._shaped(run, self._room, room=True))
            if local.copy is not None:
                mine.copy = self._shaped(run, local.copy)
            if local.a is not None:
                mine.a = self._shaped(run, local.a)
            return Block(run, rule, mine, center)

        self._shards = [[bind(*block) for block in shard] for shard in self._centers]
        self._bound = local
