"""Synchronous rounds over the live members, on a center in memory.

Each worker writes its message into its own slot and marks it complete. The round closes, once,
over the complete slots, when no live member is left that has not settled. Then every worker reduces
what shards it finds not yet reduced, so that they share the work, and adopts them all. A worker
killed at any point spoils nothing: a complete slot counts and an incomplete one does not, and a
shard half reduced is finished from the slots, which do not change before the next round.

Round numbers count from 1. A member is *settled* in the round it has contributed to or withdrawn
from; the round waits for the live members that are not.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from springline.center.local import Local
from springline.center.locks import ROUND, SHARD
from springline.center.plan import (
    BASE,
    CLOSED,
    CONTRIBUTED,
    MEMBER_OF,
    READING,
    SENT,
    SETTLED,
    STEPS,
)
from springline.center.verbs import (
    Array,
    Block,
    RefusedError,
    Side,
    adopt,
    adopted,
    mean_rates,
    step,
)
from springline.center.waiting import wait_until
from springline.rules.outer import Exchange

if TYPE_CHECKING:
    from springline.center.member import MemoryMember
    from springline.center.memory import MemoryCenter


class MemoryRounds:
    """One member's part in the rounds of its center."""

    def __init__(self, center: MemoryCenter, member: MemoryMember) -> None:
        self._center = center
        # Weak, so that a member which is let go of lets go of the memory at once.
        self._member: MemoryMember = weakref.proxy(member)
        self._memory = center.memory
        self._locks = center.locks
        self._row = member.row
        self._blocks = member.blocks.shards
        self._new = True
        self._strict = member.rule.belongs_to_a_round
        self._next = 0  # the round that the worker's buffers belong to
        self._messages: dict[int, list[list[Array]]] = {}  # by rank, views of its slot

    @property
    def number(self) -> int:
        """The number of the next round, from 0 on."""
        return self._number(self._next or self._open_round())

    def _number(self, this: int) -> int:
        return int(self._memory.head[BASE]) + this - 1

    def begin_here(self) -> None:
        """Let the worker's buffers belong to the open round: it takes the center now.

        The last round may have closed without it just before, and is reduced first.
        """
        self._help()
        self._next = self._open_round()

    def enter(self) -> None:
        """Become a member: of the open round if no worker waits in it yet, else of the next.

        The last worker of this rank may have died after a round was closed: that is reduced first,
        so that the new one takes a whole center. Where a message is measured from the center, the
        new one waits for the round that it has no part in, and takes the center after it.
        """
        with self._locks.acquire(ROUND, self._member.timeout):
            this = self._open_round()
            if self._row[CONTRIBUTED]:  # the last worker's message counts, or will
                self._row[STEPS] = max(self._row[STEPS], self._row[SENT])
            if self._row[CONTRIBUTED] < this:
                self._row[CONTRIBUTED] = 0
            self._row[READING] = 0
            self._row[SETTLED] = this if self._contributors(this) else this - 1
        self._help()
        if self._strict:
            self._my_round()

    def exchange(self, sides: list[list[Side]], local: Local) -> bool:
        """Take part in one round; False if the worker's buffers belong to an earlier one."""
        this = self._my_round()
        if self._strict and this != self._next:
            return False
        done = False
        try:
            self._contribute(local, this)
            self._settle(this, local.steps)
            wait_until(
                lambda: self._closed(this),
                lambda: self._names(self._pending(this)),
                self._member.timeout,
                f"round {this}",
            )
            self._reduce(sides)
            done = True
        finally:
            self._row[READING] = 0
            if not done:
                self._withdraw(this)
        self._next = this + 1
        return True

    def _withdraw(self, this: int) -> None:
        """Leave a round that we cannot finish, so that the others do not wait for us."""
        with self._locks.acquire(ROUND, self._member.timeout):
            if self._memory.head[CLOSED] < this:
                self._row[CONTRIBUTED] = 0
                self._row[SETTLED] = this
        self._new = True  # others may still be reading our slot

    def _open_round(self) -> int:
        return int(self._memory.head[CLOSED]) + 1

    def _contributors(self, this: int) -> list[int]:
        """Return whose message is complete, also of those that have died since."""
        return np.flatnonzero(self._memory.ranks[:, CONTRIBUTED] == this).tolist()

    def _pending(self, this: int) -> list[int]:
        return [r for r in self._center.members() if self._memory.ranks[r, SETTLED] < this]

    def _my_round(self) -> int:
        """Return the round to contribute to, after waiting for the one we have no part in."""

        def may_contribute() -> bool:
            self._here()
            with self._locks.acquire(ROUND, self._member.timeout):
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
            lambda: self._names(self._pending(self._open_round())),
            self._member.timeout,
            "the round that is under way",
        )
        # From here on no round closes without us. Our slot may still be read: our predecessor's
        # message, or without locks also our own last one, since then two may reduce one shard.
        if self._new:
            self._help()
        if self._new or not self._center.plan.use_locking:
            wait_until(
                lambda: self._here() and not self._readers(),
                lambda: self._names(self._readers()),
                self._member.timeout,
                "the last round to end",
            )
        self._new = False
        return self._open_round()

    def _readers(self) -> list[int]:
        """Return the others that may still read the slots of the last closed round."""
        closed, reading = self._memory.head[CLOSED], self._memory.ranks[:, READING]
        others = (r for r in self._center.members() if r != self._member.rank)
        return [r for r in others if reading[r] == closed != 0]

    def _contribute(self, local: Local, this: int) -> None:
        member = self._member
        np.copyto(self._memory.rates[member.rank], local.rates)
        for k in member.in_turn(self._number(this)):
            for block, side in zip(self._blocks[k], member.outgoing[k], strict=True):
                message = member.message(block, side, local)
                if message is not side.out:
                    np.copyto(side.out, message)

    def _settle(self, this: int, steps: int) -> None:
        """Mark our slot as complete: from here on it counts, also if we die."""
        with self._locks.acquire(ROUND, self._member.timeout):
            self._row[SENT] = steps
            self._row[READING] = self._row[SETTLED] = this
            self._row[CONTRIBUTED] = this

    def _here(self) -> bool:
        """Raise if we have left meanwhile: from a signal handler, or another thread."""
        self._member.check_here()
        return True

    def _closed(self, this: int) -> bool:
        self._here()
        if self._memory.head[CLOSED] < this:
            with self._locks.acquire(ROUND, self._member.timeout):
                self._close(this)
        return bool(self._memory.head[CLOSED] >= this)

    def _close(self, this: int) -> None:
        """Close the round if no member is pending. Its last store is the one that counts."""
        if self._memory.head[CLOSED] >= this or self._pending(this):
            return
        contributors = self._contributors(this)
        if contributors:
            members = self._memory.ranks[:, MEMBER_OF]
            members[:] = 0  # a closer that was killed here may have left some
            members[contributors] = this
            self._memory.head[CLOSED] = this

    def _help(self) -> None:
        """Finish a round of others, which wait for us before they reuse their slots."""
        try:
            self._reduce(None)
        finally:
            self._row[READING] = 0

    def _reduce(self, sides: list[list[Side]] | None) -> None:
        """Reduce the shards of the closed round that are not reduced yet.

        We start at our own part of them, so that all share the work.

        Args:
            sides: our buffers, which adopt the round; None to finish a round of others.

        Raises:
            NonFiniteError: a block was refused: the step of the outer optimizer overflows.
        """
        with self._locks.acquire(ROUND, self._member.timeout):
            this = int(self._memory.head[CLOSED])
            members = np.flatnonzero(self._memory.ranks[:, MEMBER_OF] == this)
            if sides is None:
                self._row[READING] = this
        reduced = self._memory.reduced
        todo = self._member.in_turn(self._number(this)) if this and len(members) else []

        def reduce(k: int) -> bool:
            if not self._center.try_acquire_shard(k):
                return False
            try:
                if reduced[k] < this:
                    self._reduce_shard(k, members.tolist(), this, sides)
                    reduced[k] = this
                elif sides:  # by another, whose slot may be in use for the next round
                    for block, side in zip(self._blocks[k], sides[k], strict=True):
                        self._adopt(k, block, side, this)
            finally:
                self._center.release_shard(k)
            return True

        def done() -> bool:
            todo[:] = [k for k in todo if not reduce(k)]
            return not todo

        wait_until(
            done,
            lambda: [self._locks.who(SHARD + k) for k in todo[:1]],
            self._member.timeout,
            f"the parts of round {this}",
        )
        if sides:
            self._check_refused(this)

    def _reduce_shard(
        self, k: int, members: list[int], this: int, sides: list[list[Side]] | None
    ) -> None:
        """Reduce and step each block that does not hold the round yet, and adopt it."""
        journal = self._center.journal
        exchange = Exchange(number=self._number(this))
        slots = [self._messages_of(r)[k] for r in members]
        rates = mean_rates([self._memory.rates[r] for r in members])
        for i, block in enumerate(self._blocks[k]):
            if not (journal and journal.holds(k, i, this)):
                try:
                    step(block, [slot[i] for slot in slots], exchange, rates)
                except RefusedError as error:
                    self._memory.refused[k] = this, error.offset
                else:
                    self._member.put_in_place(k, i, this)
            if sides:
                self._adopt(k, block, sides[k][i], this)

    def _messages_of(self, rank: int) -> list[list[Array]]:
        """Return a worker's messages: by shard, of each block."""
        if rank not in self._messages:
            slot, view = self._memory.slots[rank], self._member.blocks.view
            views = [[view(block.range, slot) for block in shard] for shard in self._blocks]
            self._messages[rank] = views
        return self._messages[rank]

    def _adopt(self, k: int, block: Block, side: Side, this: int) -> None:
        """Adopt a round that is in place, unless the block was refused."""
        number, offset = self._memory.refused[k].tolist()
        if number == this and block.range.start <= offset < block.range.stop:
            return
        adopt(block, side, adopted(block, False, side.out))

    def _check_refused(self, this: int) -> None:
        for number, offset in self._memory.refused.tolist():
            if number == this:
                raise self._member.non_finite(offset)

    def _names(self, ranks: list[int]) -> list[str]:
        return [self._center.who(rank) for rank in ranks]
