"""A redo journal per shard: a block's step happens once or not at all.

A step is made in the journal, marked ready, copied into place and marked done. The next holder
of the shard's lock redoes a copy that was ready and not done: its maker was killed.
"""

from __future__ import annotations

import numpy as np

from springline.center.blocks import Points, points_of
from springline.center.plan import JOURNAL_WORDS, Memory, Plan
from springline.center.verbs import put

_READY, _BLOCK, _NUMBER = range(3)


class Journal:
    """The journal of a center in memory.

    Attributes:
        points: of each shard's blocks, which are stepped in the journal.
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
        state, begin = memory.state_of(plan), plan.journal_head
        self.points: list[Points] = []
        for shard in ranges:
            end = begin + max((plan.room(range_) for range_ in shard), default=0)
            scratch, begin = memory.journal[begin:end], end
            self.points.append(points_of(plan, shard, memory.center, state, scratch))

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
        now, then = self.points[shard][block]
        put(then, now)
        applied = self._applied[shard]
        applied[block] = max(applied[block], head[_NUMBER])
        head[_READY] = 0
