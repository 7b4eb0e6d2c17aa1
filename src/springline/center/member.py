"""A member of a center in memory: the exchange itself.

All four verbs run in the worker, shard by shard under the shard's lock (or without it, as Hogwild),
and block by block, so that a block is still in cache when it is stepped and adopted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from springline.center.blocks import Blocks
from springline.center.center import Member, check_finite
from springline.center.layout import Bytes
from springline.center.local import Local
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
    MILLIONTH,
    NANOSECONDS,
    SEALED,
    SPEED,
    STARTED,
    STEPS,
)
from springline.center.rounds import MemoryRounds
from springline.center.verbs import (
    ERRORS,
    Array,
    Block,
    RefusedError,
    Side,
    adopted,
    commit,
    contribute,
    measure,
    non_finite,
    step,
)
from springline.center.waiting import WARN_EVERY, is_stopped, wait_until
from springline.errors import CenterError, NonFiniteError
from springline.rules.outer import Exchange
from springline.rules.rule import Rule
from springline.signals import deferred

if TYPE_CHECKING:
    from springline.center.memory import MemoryCenter

# Seconds that an exchange waits for shards that others have locked: if their holders are stopped,
# if they appear to run, and if the last exchange left the same shards out.
_STOPPED, _LONGEST, _AGAIN = 0.1, 10.0, 0.01
_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3  # between two attempts
_GATHER = 10.0  # seconds to wait for all ranks of a center that was restored
_log = logging.getLogger("springline")


class MemoryMember(Member):
    """A member of a center in memory."""

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
        self._turn = threading.RLock()  # a signal handler may leave while an exchange waits
        self._busy = False
        self._locked: set[int] = set()  # shards that the last exchange left out
        self._warned_at = 0.0
        self.left = False
        self._bound: Local | None = None
        self._sides: list[list[Side]] = []
        self.outgoing: list[list[Side]] = []  # in rounds: the same, with messages in our slot
        plan, memory = center.plan, center.memory
        scratch = center.journal.room if center.journal else None
        state = memory.state_of(plan)
        self.blocks = Blocks(plan, rule, plan.shards, memory.center, state, scratch)
        self._rounds = MemoryRounds(center, self) if rule.rounds else None
        if self._rounds:
            self._rounds.enter()
        self.start_step = int(self.row[STEPS])
        self._others = self._exchanges_of_others()  # at this worker's last exchange
        self.row[JOINED] = HERE

    @property
    def number(self) -> int:
        """The number of this worker's next exchange."""
        return self._rounds.number if self._rounds else int(self.row[EXCHANGES])

    def fastest(self) -> float:
        """Return the steps per second of the fastest live worker."""
        speeds = self.center.memory.ranks[self.center.members(), SPEED]
        return float(speeds.max(initial=0)) / MILLIONTH

    def exchange(self, local: Local) -> bool:
        """Exchange with the center; two threads of a worker take turns."""
        with self._in_turn():
            self.check_here()
            if self._busy:
                raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
            start = time.perf_counter_ns()
            if local is not self._bound:
                self._bind(local)
            fragment = self.number % self.center.plan.layout.fragments
            try:
                self._busy = True
                with np.errstate(**ERRORS):
                    if self._rounds:
                        exchanged = self._rounds.exchange(self._sides, local)
                    else:
                        self._exchange(local)
                        exchanged = True
            finally:
                self._busy = False
                local.forget_gradients(fragment)
            self.row[STEPS] = local.steps
            self.row[NANOSECONDS] += time.perf_counter_ns() - start
            self.row[LAST] = time.monotonic()
            self.row[SPEED] = local.speed * MILLIONTH
            self.row[EXCHANGES] += exchanged
            return exchanged

    def take(self, out: Bytes) -> None:
        """Copy the point that a worker continues from, consistent per shard."""
        self.center.check_process()
        if self._rounds:
            self._rounds.begin_here()
        for k in range(len(self.blocks.shards)):
            with self.center.shard_lock(k):
                self.blocks.publish(k, out)

    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Give a new center this worker's values, unless it is sealed.

        They are written even if unchanged: a worker that was killed here may have written some.
        """
        self.check_here()
        if not self.was_sealed:
            center = self.center
            with center.locks.acquire(CREATE, self.timeout):
                if not center.sealed:
                    check_finite(center.layout, center.layout.views(x))
                    np.copyto(center.memory.center, x)
                    center.memory.head[SEALED] = mark
                    return None
        return self.center.sealed

    def barrier(self) -> None:
        """Wait until all ranks are present at once, or have been before.

        If the center was restored, some may have finished before: it does not wait for long.
        """
        head, ranks = self.center.memory.head, self.center.memory.ranks
        until = time.monotonic() + (_GATHER if ranks[:, STEPS].any() else math.inf)

        def missing() -> list[str]:
            here = {rank for rank in self.center.members() if ranks[rank, JOINED] == HERE}
            return [self.center.who(r) for r in range(self.center.plan.workers) if r not in here]

        def done() -> bool:
            if not head[STARTED] and (time.monotonic() > until or not missing()):
                head[STARTED] = 1
            return bool(head[STARTED])

        wait_until(done, missing, self.timeout, "all workers to start")

    def leave(self, finished: bool = False) -> None:
        """Release the rank, once. An exchange that waits for others ends with an error."""
        if os.getpid() != self.center.process:
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
        """Exchange shard by shard, unlocked ones first.

        A shard that stays locked for longer than a running process ever holds it is left out: its
        holder is stopped. The next exchange hardly waits for it.
        """
        start, pause = time.monotonic(), _PAUSE
        todo = self.in_turn(self.number)
        others = self._exchanges_of_others()
        exchange = Exchange(number=self.center.version, staleness=others - self._others)
        self._others = others
        while todo:
            busy = [k for k in todo if not self._exchange_shard(k, local, exchange)]
            if len(busy) < len(todo):
                todo, start = busy, time.monotonic()
            elif self._in_vain(todo, time.monotonic() - start):
                break
            else:  # a few seconds at most: no signal handler leaves an exchange half made
                time.sleep(pause)
                pause = min(1.3 * pause, _LONGEST_PAUSE)
        self._leave_out(todo)

    def in_turn(self, number: int) -> list[int]:
        """Return the shards of an exchange, those first that others leave for later."""
        fragments = self.center.plan.fragments
        shards = list(fragments[number % len(fragments)])
        first = self.rank * len(shards) // self.center.plan.workers
        return shards[first:] + shards[:first]

    def _in_vain(self, shards: list[int], waited: float) -> bool:
        """Whether to stop waiting for shards that others have locked."""
        if waited > _LONGEST or (waited > _AGAIN and self._locked.issuperset(shards)):
            return True
        holders = (self.center.locks.holder(SHARD + k) for k in shards)
        return waited > _STOPPED and all(is_stopped(process) for process in holders)

    def _exchange_shard(self, k: int, local: Local, exchange: Exchange) -> bool:
        if not self.center.try_acquire_shard(k):
            return False
        try:
            for i, side in enumerate(self._sides[k]):
                self._exchange_block(k, i, side, local, exchange)
        finally:
            self.center.release_shard(k)
        return True

    def _exchange_block(self, k: int, i: int, side: Side, local: Local, exchange: Exchange) -> None:
        """Contribute, step, adopt; then what was stepped is put in place."""
        block, journal = self.blocks.shards[k][i], self.center.journal
        if block.rule.adopts_seen:
            measure(block, side, block.now.c)
        if journal is None and self._swap(block, side):
            return
        stepped = block.has_gradient(local.seen)
        if stepped:
            message = self.message(block, side, local)
            try:
                own = message is side.out
                step(block, (message,), exchange, local.rates, scratch=own)
            except RefusedError as error:
                raise self.non_finite(error.offset) from error
        c = adopted(block, stepped, side.out)
        if not block.rule.adopts_seen:
            measure(block, side, c)
        block.rule.adopt(side.x, side.base, c, block.work)
        if stepped:
            self.put_in_place(k, i, 0)

    def put_in_place(self, k: int, i: int, number: int) -> None:
        """Put a block's step in place: through the journal, unless it may be made again."""
        block, journal = self.blocks.shards[k][i], self.center.journal
        if journal and not block.direct:
            journal.commit(k, i, number)
        else:
            commit(block)

    def _swap(self, block: Block, side: Side) -> bool:
        try:
            return block.rule.swap(side.x, side.base, block.now.c, block.work)
        except FloatingPointError:
            return False

    def _exchanges_of_others(self) -> int:
        exchanges = self.center.memory.ranks[:, EXCHANGES]
        return int(exchanges.sum() - exchanges[self.rank])

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
                len(self._sides),
                self.center.locks.who(SHARD + shards[0]),
            )

    def message(self, block: Block, side: Side, local: Local) -> Array:
        """Return a block's message, which is finite."""
        try:
            return contribute(block, side, int(local.gradients[block.range.fragment]))
        except RefusedError as error:
            raise self.non_finite(error.offset) from error

    def non_finite(self, offset: int) -> NonFiniteError:
        """Return the error for a block that was refused."""
        return non_finite(self.center.layout, offset, self.rank)

    def _bind(self, local: Local) -> None:
        """Lay the worker's buffers beside the center's blocks."""
        mine, distance = (local.x, local.a, local.base), local.distance
        self._sides = self.blocks.bind(*mine, distance=distance)
        if self._rounds:
            slot = self.center.memory.slots[self.rank]
            self.outgoing = self.blocks.bind(*mine, slot, distance)
        self._bound = local
