"""Asynchronous exchanges on a center in memory: a worker takes its steps alone.

All four verbs run in the worker, shard by shard under the shard's lock (or without it, as Hogwild),
and block by block, so that a block is still in cache when it is stepped and adopted.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

from springline.center.local import Local
from springline.center.locks import SHARD
from springline.center.plan import EXCHANGES, LEFT_OUT
from springline.center.verbs import Block, RefusedError, Side, adopted, measure, step
from springline.center.waiting import WARN_EVERY, is_stopped
from springline.rules.outer import Exchange

if TYPE_CHECKING:
    from springline.center.member import MemoryMember
    from springline.center.memory import MemoryCenter

# Seconds that an exchange waits for shards that others have locked: if their holders are stopped,
# if they appear to run, and if the last exchange left the same shards out.
_STOPPED, _LONGEST, _AGAIN = 0.1, 10.0, 0.01
_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3  # between two attempts
_log = logging.getLogger("springline")


class Asynchronous:
    """One member's exchanges with its center."""

    def __init__(self, center: MemoryCenter, member: MemoryMember) -> None:
        self._center = center
        # Weak, so that a member which is let go of lets go of the memory at once.
        self._member: MemoryMember = weakref.proxy(member)
        self._row = member.row
        self._blocks = member.blocks.shards
        self._locked: set[int] = set()  # shards that the last exchange left out
        self._warned_at = 0.0
        self._others = 0  # exchanges of others, at this worker's last

    @property
    def number(self) -> int:
        """The number of the next exchange."""
        return int(self._row[EXCHANGES])

    def begin_here(self) -> None:
        """A worker may exchange what it has, whenever it took the center."""

    def enter(self) -> None:
        """Become a member."""
        self._others = self._exchanges_of_others()

    def exchange(self, sides: list[list[Side]], local: Local) -> bool:
        """Exchange shard by shard, unlocked ones first.

        A shard that stays locked for longer than a running process ever holds it is left out: its
        holder is stopped. The next exchange hardly waits for it.
        """
        start, pause = time.monotonic(), _PAUSE
        todo = self._member.in_turn(self.number)
        others = self._exchanges_of_others()
        exchange = Exchange(number=self._center.version, staleness=others - self._others)
        self._others = others
        while todo:
            busy = [k for k in todo if not self._exchange_shard(k, sides[k], local, exchange)]
            if len(busy) < len(todo):
                todo, start = busy, time.monotonic()
            elif self._in_vain(todo, time.monotonic() - start):
                break
            else:  # a few seconds at most: no signal handler leaves an exchange half made
                time.sleep(pause)
                pause = min(1.3 * pause, _LONGEST_PAUSE)
        self._leave_out(todo)
        return True

    def _in_vain(self, shards: list[int], waited: float) -> bool:
        """Whether to stop waiting for shards that others have locked."""
        if waited > _LONGEST or (waited > _AGAIN and self._locked.issuperset(shards)):
            return True
        holders = (self._center.locks.holder(SHARD + k) for k in shards)
        return waited > _STOPPED and all(is_stopped(process) for process in holders)

    def _exchange_shard(self, k: int, sides: list[Side], local: Local, exchange: Exchange) -> bool:
        if not self._center.try_acquire_shard(k):
            return False
        try:
            for i, side in enumerate(sides):
                self._exchange_block(k, i, side, local, exchange)
        finally:
            self._center.release_shard(k)
        return True

    def _exchange_block(self, k: int, i: int, side: Side, local: Local, exchange: Exchange) -> None:
        """Contribute, step, adopt; then what was stepped is put in place."""
        block, member = self._blocks[k][i], self._member
        if block.rule.adopts_seen:
            measure(block, side, block.now.c)
        if self._center.journal is None and self._swap(block, side):
            return
        stepped = block.has_gradient(local.seen)
        if stepped:
            message = member.message(block, side, local)
            try:
                own = message is side.out
                step(block, (message,), exchange, local.rates, scratch=own)
            except RefusedError as error:
                raise member.non_finite(error.offset) from error
        c = adopted(block, stepped, side.out)
        if not block.rule.adopts_seen:
            measure(block, side, c)
        block.rule.adopt(side.x, side.base, c, block.work)
        if stepped:
            member.put_in_place(k, i, 0)

    def _swap(self, block: Block, side: Side) -> bool:
        try:
            return block.rule.swap(side.x, side.base, block.now.c, block.work)
        except FloatingPointError:
            return False

    def _exchanges_of_others(self) -> int:
        exchanges = self._center.memory.ranks[:, EXCHANGES]
        return int(exchanges.sum() - self._row[EXCHANGES])

    def _leave_out(self, shards: list[int]) -> None:
        self._locked = set(shards)
        if not shards:
            return
        self._row[LEFT_OUT] += len(shards)
        now = time.monotonic()
        if now > self._warned_at + WARN_EVERY:
            self._warned_at = now
            _log.warning(
                "%d of %d parts of the center are left out of this worker's exchanges: they are "
                "locked by %s.",
                len(shards),
                len(self._blocks),
                self._center.locks.who(SHARD + shards[0]),
            )
