"""Synchronous rounds over the live members, on a center in memory.

Each worker writes its message into its own slot and marks it complete. The round closes, once,
over the complete slots of the live members. Then every worker reduces what shards it finds not yet
reduced, so that they share the work, and adopts them all. A worker killed at any point spoils
nothing: an incomplete slot does not count, and a shard half reduced is reduced again from the
slots, which nobody touches before the next round.

Round numbers count from 1. A member is *settled* in the round it has contributed to or withdrawn
from; the round waits for the live members that are not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from springline.center.center import Local
from springline.center.errors import NonFiniteError, RoundTimeoutError
from springline.center.layout import Bytes
from springline.center.locks import RANK, ROUND, SHARD
from springline.center.plan import ADOPTED, CLOSED, CONTRIBUTED, MEMBER_OF, SETTLED
from springline.center.waiting import wait_until

if TYPE_CHECKING:
    from springline.center.memory import Block, MemoryCenter, MemoryMember


class Rounds:
    """One member's part in the rounds of its center."""

    def __init__(self, center: MemoryCenter, member: MemoryMember) -> None:
        self._center = center
        self._member = member
        self._memory = center.memory
        self._locks = center.locks
        self._row = member.row
        self._new = True

    def enter(self) -> None:
        """Become a member: of the open round if nobody waits in it yet, else of the next."""
        with self._locks.hold(ROUND):
            this = self._open_round()
            self._row[CONTRIBUTED] = self._row[ADOPTED] = 0
            self._row[SETTLED] = this if self._contributors(this) else this - 1

    def exchange(self, shards: list[list[Block]], local: Local) -> None:
        """Take part in one round."""
        this = self._my_round(shards)
        try:
            self._contribute(shards, local)
        except NonFiniteError:
            self._settle(this, contributed=False)
            raise
        self._settle(this, contributed=True)
        try:
            wait_until(
                lambda: self._closed(this),
                lambda: self._pending(this),
                self._member.timeout,
                f"round {this}",
            )
        except RoundTimeoutError:
            with self._locks.hold(ROUND):
                if self._memory.head[CLOSED] < this:
                    self._row[CONTRIBUTED] = 0  # the round can close without us
                    raise
        try:
            self._reduce(this, shards, adopt=True)
        finally:
            self._row[ADOPTED] = this

    def _open_round(self) -> int:
        return int(self._memory.head[CLOSED]) + 1

    def _live(self) -> list[int]:
        return [r for r in range(self._center.plan.workers) if self._locks.held(RANK + r)]

    def _contributors(self, this: int) -> list[int]:
        return [r for r in self._live() if self._memory.ranks[r, CONTRIBUTED] == this]

    def _pending(self, this: int) -> list[int]:
        return [r for r in self._live() if self._memory.ranks[r, SETTLED] < this]

    def _my_round(self, shards: list[list[Block]]) -> int:
        """Return the round to contribute to, after waiting for the one we have no part in."""
        if self._new:
            # Whoever had this rank may have died in the middle of a round.
            self._reduce(int(self._memory.head[CLOSED]), shards, adopt=False)
        if self._new or not self._center.plan.use_locking:
            # Somebody may still be reading our slot: our predecessor's, or without locks also our
            # own, since then two may reduce the same shard.
            wait_until(
                lambda: not self._adopting(),
                self._adopting,
                self._member.timeout,
                "the last round to end",
            )
        self._new = False

        def may_contribute() -> bool:
            with self._locks.hold(ROUND):
                this = self._open_round()
                if self._row[SETTLED] < this:
                    return True
                if not self._pending(this) and not self._contributors(this):
                    self._memory.ranks[:, SETTLED] = this - 1  # all withdrew: it begins again
                    return True
                self._close(this)
                return bool(self._row[SETTLED] < self._open_round())

        wait_until(
            may_contribute,
            lambda: self._pending(self._open_round()),
            self._member.timeout,
            "the round that is under way",
        )
        return self._open_round()

    def _adopting(self) -> list[int]:
        closed, ranks = self._memory.head[CLOSED], self._memory.ranks
        return [
            r
            for r in self._live()
            if r != self._member.rank
            and ranks[r, CONTRIBUTED] == closed != 0
            and ranks[r, ADOPTED] < closed
        ]

    def _contribute(self, shards: list[list[Block]], local: Local) -> None:
        slot = self._memory.slots[self._member.rank]
        for blocks in shards:
            for block in blocks:
                np.copyto(block.run.view(slot), self._member.message(block, local))

    def _settle(self, this: int, contributed: bool) -> None:
        with self._locks.hold(ROUND):
            self._row[CONTRIBUTED] = this if contributed else 0
            self._row[SETTLED] = this

    def _closed(self, this: int) -> bool:
        if self._memory.head[CLOSED] < this:
            with self._locks.hold(ROUND):
                self._close(this)
        return bool(self._memory.head[CLOSED] >= this)

    def _close(self, this: int) -> None:
        """Close the round if it waits for nobody. Its last store is the one that counts."""
        if self._memory.head[CLOSED] >= this or self._pending(this):
            return
        contributors = self._contributors(this)
        if contributors:
            members = self._memory.ranks[:, MEMBER_OF]
            members[:] = 0  # a closer that was killed here may have left some
            members[contributors] = this
            self._memory.head[CLOSED] = this

    def _reduce(self, this: int, shards: list[list[Block]], adopt: bool) -> None:
        """Reduce the shards that nobody has reduced yet, starting at our own part of them."""
        ranks, reduced, n = self._memory.ranks, self._memory.reduced, len(shards)
        slots = [self._memory.slots[r] for r in np.flatnonzero(ranks[:, MEMBER_OF] == this)]
        first = self._member.rank * n // self._center.plan.workers
        todo = [(first + k) % n for k in range(n)] if this else []
        while todo:
            busy = []
            for k in todo:
                if reduced[k] >= this:
                    if adopt:
                        for block in shards[k]:
                            block.rule.adopt(block.local, block.local.x, block.center.c)
                elif not self._take(k):
                    busy.append(k)
                else:
                    try:
                        if reduced[k] < this:
                            self._reduce_shard(shards[k], slots, adopt)
                            reduced[k] = this
                        else:  # just now, by another, whose slot may be in use for the next round
                            busy.append(k)
                    finally:
                        self._release(k)
            todo = busy
            if busy:
                time.sleep(50e-6)

    def _reduce_shard(self, blocks: list[Block], slots: list[Bytes], adopt: bool) -> None:
        for block in blocks:
            block.rule.merge(block.center, [block.run.view(slot) for slot in slots], 0.0)
            if adopt:
                block.rule.adopt(block.local, block.local.x, block.center.c)

    def _take(self, shard: int) -> bool:
        return not self._center.plan.use_locking or self._locks.take(SHARD + shard)

    def _release(self, shard: int) -> None:
        if self._center.plan.use_locking:
            self._locks.release(SHARD + shard)
