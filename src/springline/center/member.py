"""One worker's place at a center in memory: the exchange itself.

`merge` runs in the worker, shard by shard under the shard's lock (or without it, as Hogwild), and
block by block, so that a block is still in cache when it is merged and adopted.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from springline.center.blocks import (
    Block,
    Part,
    RefusedError,
    make_message,
    merge_message,
    non_finite,
)
from springline.center.center import Local, Member, check_finite
from springline.center.errors import CenterError, NonFiniteError
from springline.center.layout import Bytes
from springline.center.locks import CREATE
from springline.center.plan import (
    EXCHANGES,
    FINISHED,
    HERE,
    JOINED,
    JOINING,
    NANOSECONDS,
    SEALED,
    STARTED,
    STEPS,
)
from springline.center.rounds import Rounds
from springline.center.waiting import wait_until
from springline.rules.rule import Rule

if TYPE_CHECKING:
    from springline.center.memory import MemoryCenter


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
        self.row[JOINED] = JOINING  # until we are in the rounds, too
        self.was_sealed = bool(center.sealed)
        self.start_step = int(self.row[STEPS])
        self._turn = threading.RLock()  # a signal handler may leave in the middle of an exchange
        self._busy = False
        self.left = False
        self._bound: Local | None = None
        self._shards: list[list[Block]] = []
        plan, memory = center.plan, center.memory
        self._part = Part(plan, rule, plan.shards, memory.center, memory.state_of(plan))
        self._room = self._part.room()
        self._rounds = Rounds(center, self) if rule.synchronous else None
        if self._rounds:
            self._rounds.enter(self._part.shards)
        self.row[JOINED] = HERE

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

    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Give a new center this worker's values, unless it is sealed.

        They are written in any case: a worker that was killed here may have written some of its.
        """
        self.check_here()
        if not self.was_sealed:
            center = self.center
            with center.locks.hold(CREATE):
                if not center.sealed:
                    check_finite(center.layout, center.layout.views(x))
                    np.copyto(center.memory.center, x)
                    center.memory.head[SEALED] = mark
                    return None
        return self.center.sealed

    def barrier(self) -> None:
        """Wait until all ranks have joined and are there at once, or have been before."""
        head, ranks = self.center.memory.head, self.center.memory.ranks

        def missing() -> set[int]:
            here = {rank for rank in self.center.members() if ranks[rank, JOINED] == HERE}
            return set(range(self.center.plan.workers)) - here

        def done() -> bool:
            if not head[STARTED] and not missing():
                head[STARTED] = 1
            return bool(head[STARTED])

        wait_until(done, missing, self.timeout, "all workers to start")

    def leave(self, finished: bool = False) -> None:
        """Give the rank back, once. An exchange that waits for others ends with an error."""
        if self.left or os.getpid() != self.center._process:
            return
        self.left = True
        if finished:
            self.row[JOINED] = FINISHED
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
                    self._swap(block, local)

    def _swap(self, block: Block, local: Local) -> None:
        """Contribute, merge and adopt one block."""
        mine, ours, entry = block.local, block.center, block.run.entry
        if entry is None or local.seen[entry]:
            message = self.message(block, local)
            try:
                merge_message(block, message, 0.0 if entry is None else float(local.rates[entry]))
            except RefusedError as error:
                raise self._non_finite(block, error) from error
        else:
            message = mine.x  # no gradient since the last exchange: nothing to merge
        block.rule.adopt(mine, message, ours.c)

    def message(self, block: Block, local: Local) -> NDArray[Any]:
        """Return a block's message, which is finite."""
        try:
            return make_message(block, local.gradients)
        except RefusedError as error:
            raise self._non_finite(block, error) from error

    def _non_finite(self, block: Block, error: RefusedError) -> NonFiniteError:
        return non_finite(self.center.layout, block.run, error.values, self.rank)

    def _bind(self, local: Local) -> None:
        """Lay the worker's buffers beside the center's blocks."""
        self._shards = self._part.bind(local.x, self._room, local.a, local.copy)
        self._bound = local
