"""A member of a center in memory. It exchanges in rounds, or asynchronously."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from springline.center.asynchronous import Asynchronous
from springline.center.blocks import Blocks
from springline.center.center import Member, check_finite
from springline.center.layout import Bytes
from springline.center.local import Local
from springline.center.locks import CREATE
from springline.center.plan import (
    ENDS,
    EXCHANGES,
    FINISHED,
    HERE,
    JOINED,
    JOINING,
    LAST,
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
    commit,
    contribute,
    non_finite,
)
from springline.center.waiting import wait_until
from springline.errors import CenterError, NonFiniteError
from springline.rules.rule import Rule
from springline.signals import deferred

if TYPE_CHECKING:
    from springline.center.memory import MemoryCenter

_GATHER = 10.0  # seconds to wait for all ranks of a center that was restored


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
        self.left = False
        self._bound: Local | None = None
        self._sides: list[list[Side]] = []
        self.outgoing: list[list[Side]] = []  # in rounds: the same, with messages in our slot
        plan, memory = center.plan, center.memory
        points = center.journal.points if center.journal else None
        state = memory.state_of(plan)
        self.blocks = Blocks(plan, rule, plan.shards, memory.center, state, points)
        self._mode = MemoryRounds(center, self) if rule.rounds else Asynchronous(center, self)
        self._mode.enter()
        self.start_step = int(self.row[STEPS])
        self.row[JOINED] = HERE

    @property
    def number(self) -> int:
        """The number of this worker's next exchange."""
        return self._mode.number

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
                    exchanged = self._mode.exchange(self._sides, local)
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
        self._mode.begin_here()
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

    def in_turn(self, number: int) -> list[int]:
        """Return the shards of an exchange, those first that others leave for later."""
        fragments = self.center.plan.fragments
        shards = list(fragments[number % len(fragments)])
        first = self.rank * len(shards) // self.center.plan.workers
        return shards[first:] + shards[:first]

    def put_in_place(self, k: int, i: int, number: int) -> None:
        """Put a block's step in place: through the journal, unless it may be made again."""
        block, journal = self.blocks.shards[k][i], self.center.journal
        if journal and not block.direct:
            journal.commit(k, i, number)
        else:
            commit(block)

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
        if self.rule.rounds:
            slot = self.center.memory.slots[self.rank]
            self.outgoing = self.blocks.bind(*mine, slot, distance)
        self._bound = local
