"""A redo journal per shard: a block's step happens once or not at all.

A step is made in the journal, marked ready, copied into place and marked done. The next holder
of the shard's lock redoes a copy that was ready and not done: its maker was killed.
"""

from __future__ import annotations

import numpy as np

from springline.center.blocks import like, point, shaped
from springline.center.layout import Bytes
from springline.center.plan import JOURNAL_WORDS, Memory, Plan
from springline.center.verbs import put
from springline.rules.outer import Point

_READY, _BLOCK, _NUMBER = range(3)


class Journal:
    """The journal of a center in memory.

    Args:
        plan: the center's.
        memory: the center's.
    """

    def __init__(self, plan: Plan, memory: Memory) -> None:
        ranges = [plan.blocks(shard) for shard in plan.shards]
        numbers = memory.journal[: plan.journal_head].view(np.int64)
        heads = JOURNAL_WORDS * len(ranges)
        self._heads = numbers[:heads].reshape(-1, JOURNAL_WORDS)
        self._applied, at = [], heads
        for shard in ranges:  # the last round that each block holds
            self._applied.append(numbers[at : at + len(shard)])
            at += len(shard)
        self._rooms: list[Bytes] = []
        begin = plan.journal_head
        for shard in ranges:
            end = begin + max((plan.room(range_) for range_ in shard), default=0)
            self._rooms.append(memory.journal[begin:end])
            begin = end
        state = memory.state_of(plan)

        def points(k: int) -> list[tuple[Point, Point]]:
            now = [
                point(plan, r, shaped(plan, r, memory.center[r.start : r.stop]), state)
                for r in ranges[k]
            ]
            return [(p, like(p, self._rooms[k])) for p in now]

        self._points = [points(k) for k in range(len(ranges))]

    def room(self, shard: int) -> Bytes:
        """Return where the blocks of a shard are stepped."""
        return self._rooms[shard]

    def holds(self, shard: int, block: int, number: int) -> bool:
        """Whether a block holds a round already."""
        return bool(self._applied[shard][block] >= number)

    def commit(self, shard: int, block: int, number: int) -> None:
        """Put what was stepped in place, for good.

        Args:
            shard: whose lock is held.
            block: which of its blocks.
            number: of the round, 0 without rounds.
        """
        head = self._heads[shard]
        head[_BLOCK], head[_NUMBER] = block, number
        head[_READY] = 1
        self.finish(shard)

    def finish(self, shard: int) -> None:
        """Finish what a killed process has left half copied; its lock is held."""
        head = self._heads[shard]
        if not head[_READY]:
            return
        block = int(head[_BLOCK])
        now, then = self._points[shard][block]
        put(then, now)
        applied = self._applied[shard]
        applied[block] = max(applied[block], head[_NUMBER])
        head[_READY] = 0
