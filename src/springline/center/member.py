"""One worker's place at a center in memory: the exchange itself.

`merge` runs in the worker, shard by shard under the shard's lock (or without it, as Hogwild), and
block by block, so that a block is still in cache when it is merged and adopted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
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
from springline.center.locks import CREATE, SHARD
from springline.center.plan import (
    ENDS,
    EXCHANGES,
    FINISHED,
    HERE,
    JOINED,
    JOINING,
    LAST,
    LEFT_OUT,
    NANOSECONDS,
    SEALED,
    STARTED,
    STEPS,
)
from springline.center.rounds import Rounds
from springline.center.waiting import WARN_EVERY, is_stopped, wait_until
from springline.rules.rule import Rule
from springline.signals import deferred

if TYPE_CHECKING:
    from springline.center.memory import MemoryCenter

# Seconds that an exchange waits for parts which others have locked: if their holders are stopped,
# if they do not seem to be (frozen, perhaps), and if it was left without them the last time.
_STOPPED, _LONGEST, _AGAIN = 0.1, 10.0, 0.01
_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3  # between two looks at them
_log = logging.getLogger("springline")


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
        self.row[ENDS] = 0
        self.was_sealed = bool(center.sealed)
        self.start_step = int(self.row[STEPS])
        self._turn = threading.RLock()  # a signal handler may leave while an exchange waits
        self._busy = False
        self._locked: set[int] = set()  # parts that the last exchange was left without
        self._warned_at = 0.0
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
        with self._in_turn():
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
            self.row[LAST] = time.monotonic()
            self.row[EXCHANGES] += 1

    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Give a new center this worker's values, unless it is sealed.

        They are written in any case: a worker that was killed here may have written some of its.
        """
        self.check_here()
        if not self.was_sealed:
            center = self.center
            with center.locks.hold(CREATE, self.timeout):
                if not center.sealed:
                    check_finite(center.layout, center.layout.views(x))
                    np.copyto(center.memory.center, x)
                    center.memory.head[SEALED] = mark
                    return None
        return self.center.sealed

    def barrier(self) -> None:
        """Wait until all ranks have joined and are there at once, or have been before."""
        head, ranks = self.center.memory.head, self.center.memory.ranks

        def missing() -> list[str]:
            here = {rank for rank in self.center.members() if ranks[rank, JOINED] == HERE}
            return [self.center.who(r) for r in range(self.center.plan.workers) if r not in here]

        def done() -> bool:
            if not head[STARTED] and not missing():
                head[STARTED] = 1
            return bool(head[STARTED])

        wait_until(done, missing, self.timeout, "all workers to start")

    def leave(self, finished: bool = False) -> None:
        """Give the rank back, once. An exchange that waits for others ends with an error."""
        if os.getpid() != self.center._process:
            return
        with deferred():
            if finished and not self.left:
                self.row[JOINED] = FINISHED
            self.left = True
            with self._in_turn():
                self.center.forget(self)

    def check_here(self) -> None:
        """Refuse to exchange when no longer a member."""
        if self.left:
            raise CenterError(f"Rank {self.rank} has left the center; join again to exchange.")
        self.center.check_process()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Wait for this worker's other thread; no signal handler runs meanwhile."""
        with deferred():
            wait_until(
                lambda: self._turn.acquire(blocking=False),
                lambda: ["another thread of this process"],
                None,
                "this worker's own exchange",
            )
            try:
                yield
            finally:
                self._turn.release()

    def _exchange(self, local: Local) -> None:
        """Exchange shard by shard, those first that nobody else has locked.

        What others keep locked for longer than a process that runs ever does is left out: its
        holder is stopped. Next time there is hardly a wait for it.
        """
        n, start, pause = len(self._shards), time.monotonic(), _PAUSE
        first = self.rank * n // self.center.plan.workers
        todo = [(first + k) % n for k in range(n)]
        while todo:
            busy = [k for k in todo if not self._exchange_shard(k, local)]
            if len(busy) < len(todo):
                todo, start = busy, time.monotonic()
            elif self._in_vain(todo, time.monotonic() - start):
                break
            else:
                time.sleep(pause)
                pause = min(1.3 * pause, _LONGEST_PAUSE)
        self._leave_out(todo)

    def _in_vain(self, shards: list[int], waited: float) -> bool:
        """Whether to wait no longer for shards that others have locked."""
        if waited > _LONGEST or (waited > _AGAIN and self._locked.issuperset(shards)):
            return True
        holders = (self.center.locks.holder(SHARD + k) for k in shards)
        return waited > _STOPPED and all(is_stopped(process) for process in holders)

    def _exchange_shard(self, k: int, local: Local) -> bool:
        locks = self.center.locks if self.center.plan.use_locking else None
        if locks and not locks.take(SHARD + k):
            return False
        try:
            for block in self._shards[k]:
                self._swap(block, local)
        finally:
            if locks:
                locks.release(SHARD + k)
        return True

    def _leave_out(self, shards: list[int]) -> None:
        self._locked = set(shards)
        if not shards:
            return
        self.row[LEFT_OUT] += len(shards)
        now = time.monotonic()
        if now > self._warned_at + WARN_EVERY:
            self._warned_at = now
            _log.warning(
                "%d of %d parts of the center are left out of this worker's exchanges: they are "
                "locked by %s.",
                len(shards),
                len(self._shards),
                self.center.locks.who(SHARD + shards[0]),
            )

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
