"""The head of a remote center: who is a member, how far each rank has come, which round it is.

It holds no parameters. Members send heartbeats; one that is silent for `GRACE` seconds, or that its
launcher reports dead, is dropped. A head that restarts asks the shards how far every rank has come,
and the members rejoin with their next heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import ClassVar

from springline.center.plan import Plan
from springline.center.remote.membership import TICK, Membership, MemberState
from springline.center.remote.messages import ClosedRound, Look, RankProgress
from springline.center.remote.registration import Registration
from springline.center.token import issue, sign
from springline.errors import EndedError, forgotten, rank_in_use, taken_over

HEARTBEAT = 0.5  # seconds between two heartbeats of a member
GRACE = 10.0  # seconds without one after which a member counts as dead
_LATE = 3  # heartbeats of a dead worker that may still arrive
_REJOIN = 4 * HEARTBEAT  # seconds that members have to rejoin a head that restarted
AskRows = Callable[[int], Awaitable[tuple[dict[int, RankProgress], int]]]


class Head:
    """The head of one center.

    Args:
        ask_rows: asks that many shards for their rows.
        storage: where it writes down what the center is, if anywhere.
        grace: seconds without a heartbeat after which a member counts as dead.
        name: the center's.
        token: the center's, to sign with what is given out.
    """

    calls: ClassVar[tuple[str, ...]] = (
        *("look", "stay", "sealed", "seal"),
        *("join", "joined", "heartbeat", "leave", "finish", "barrier"),
        *("begin", "contribute", "withdraw"),
    )

    def __init__(
        self,
        ask_rows: AskRows,
        storage: str | None = None,
        grace: float = GRACE,
        name: str = "center",
        token: str = "",
    ) -> None:
        self.registration = Registration(storage, name)
        self._token = token
        self._ask_rows = ask_rows
        self._membership = Membership(grace, token)
        self._known = False  # whether the rows are those of the shards
        self._rows: dict[int, RankProgress] = {}
        self._started = False
        self._finished: set[int] = set()
        self._given_up: tuple[float, list[int]] | None = None  # when reported, and which
        self._ending = False

    @property
    def plan(self) -> Plan | None:
        """The center's; None before it is made."""
        return self.registration.plan

    async def look(self) -> Look | None:
        """Return what is known; None while there is no center."""
        description = self.registration.description if self.registration.is_there() else None
        if description is None:
            return None
        if not self._known:
            await self._ask()
        at, given_up = self._given_up or (-GRACE, None)
        return Look(
            self._membership.alive(),
            {rank: self._row(rank) for rank in self._rows},
            self._membership.closed,
            description,
            sorted(self._finished),
            given_up if time.monotonic() - at < GRACE else None,
        )

    async def stay(self, given_up: list[int] | None = None) -> None:
        """Note that there is a launcher, and which ranks it does not restart."""
        if given_up is not None:
            self._given_up = time.monotonic(), given_up

    # The first values.

    async def sealed(self) -> int:
        """Return how the center was sealed (see `Member.seal`): a mark, or 1; 0 if it is not."""
        mark, _, _ = self.registration.seal
        done = self.registration.base or any(row.exchanges for row in self._rows.values())
        return mark or int(bool(done))

    async def seal(
        self, rank: int, incarnation: int, mark: int, changed: bool, held: int
    ) -> tuple[str, int]:
        """Let a worker seal a new center; others wait meanwhile.

        Args:
            rank: the worker's.
            incarnation: the worker's.
            mark: identifies its parameters.
            changed: whether the shards have others.
            held: the lease under which it has sent its parameters to the shards; 0 if it has not.

        Returns:
            "done"; "sealed", and by which mark; "send", and a lease; "wait", and for which rank.
        """
        self._membership.member(rank, incarnation)
        me = [mark, rank, incarnation]
        if by := await self.sealed():
            return ("done", 0) if self.registration.seal == me else ("sealed", by)
        # A head that was restarted does not know which rank had a lease, and may have sent values.
        if to_do := self._membership.lease(
            rank, incarnation, changed or self.registration.found, held
        ):
            return to_do
        self.registration.publish({**(self.registration.description or {}), "seal": me})
        return "done", 0

    # Members.

    async def join(self, rank: int, incarnation: int | None = None) -> tuple[int, RankProgress]:
        """Join: at once if the rank is free, else when its holder turns out to be dead.

        Args:
            rank: the worker's.
            incarnation: of a member that the head has forgotten, or dropped.

        Returns:
            The incarnation, and how far the rank has come.
        """
        if self._ending:
            raise EndedError("The center is being ended. Start the run again.")
        if not self.registration.is_there():
            raise self.registration.problem or forgotten()
        await self._ask()  # the shards may know more of its last incarnation
        heartbeats: set[float] = set()
        while (holder := self._membership.members.get(rank)) and holder.incarnation != incarnation:
            if not self._membership.is_alive(holder):
                break
            heartbeats.add(holder.heard)
            if len(heartbeats) > _LATE:
                raise rank_in_use(rank, self._membership.alive())
            await self._membership.wait(time.monotonic() + TICK)
        row = self._row(rank)
        if holder and holder.incarnation == incarnation:
            holder.heard = time.monotonic()  # it keeps its part in the round
            return incarnation, row
        new = incarnation is None
        if incarnation is None:
            incarnation = issue(self._token, f"rank {rank}", after=row.incarnation)
        elif incarnation < max(row.incarnation, holder.incarnation if holder else 0):
            raise taken_over(rank)
        self._finished.discard(rank)
        this = self._membership.closed + 1
        late = new and bool(self._membership.contributing(this))  # it is in the next round
        settled = this if late else this - 1
        self._membership.members[rank] = MemberState(incarnation, time.monotonic(), settled)
        self._note(rank, incarnation, row)
        self._membership.changed()
        return incarnation, row

    async def joined(self, rank: int, incarnation: int) -> None:
        """Count a member in for the barrier."""
        member = self._membership.find(rank, incarnation)
        if member:
            member.joined = True
            self._membership.changed()

    async def heartbeat(self, rank: int, incarnation: int, row: RankProgress) -> float | None:
        """Note that a member is alive and how far it has come.

        Returns:
            The steps per second of the fastest live worker; None if this one has to rejoin.
        """
        member = self._membership.find(rank, incarnation)
        if member is None:
            return None
        member.heard, member.speed = time.monotonic(), row.speed
        self._note(rank, incarnation, row)
        alive = (self._membership.members[r] for r in self._membership.alive())
        return max((m.speed for m in alive), default=0.0)

    async def leave(self, rank: int, incarnation: int | None, finished: bool = False) -> None:
        """Give a rank back; without an incarnation, its holder is known to be dead.

        A member that leaves in a round withdraws from it; the message of a dead one counts.
        """
        member = self._membership.members.get(rank)
        if finished and incarnation is not None:
            await self.finish(rank, incarnation)
        if member and incarnation in (None, member.incarnation):
            del self._membership.members[rank]
            sent = self._membership.sent.get(rank)
            if sent and sent.number > self._membership.closed and sent.incarnation == incarnation:
                del self._membership.sent[rank]
            self._membership.changed()

    async def finish(self, rank: int, incarnation: int) -> None:
        """Note that a rank has finished, unless it has come back since."""
        member = self._membership.members.get(rank)
        if member is None or member.incarnation <= incarnation:
            self._finished.add(rank)

    async def barrier(self, seconds: float) -> list[int]:
        """Wait a while until all ranks are there at once, or have been; return the missing."""
        missing: list[int] = []
        deadline = time.monotonic() + seconds
        while not self._started:
            missing = self._membership.missing(self.plan.workers if self.plan else 0)
            self._started = not missing
            if self._started:
                self._membership.changed()
            elif time.monotonic() >= deadline:
                return missing
            else:
                await self._membership.wait(deadline)
        return []

    # Rounds.

    async def begin(self, rank: int, incarnation: int, seconds: float) -> int | list[int]:
        """Wait a while for a round to contribute to; return it, or the ranks it waits for."""
        deadline = time.monotonic() + seconds
        while True:
            member, this = self._membership.member(rank, incarnation), self._membership.closed + 1
            if member.settled < this:
                return this
            pending = self._membership.pending(this)
            if not pending and not self._membership.reducing(this):
                self._membership.begin_again(this)
            elif not self._membership.close(this):
                if time.monotonic() >= deadline:
                    return pending or self._membership.contributing(this)
                await self._membership.wait(deadline)

    async def contribute(
        self, rank: int, incarnation: int, number: int, seconds: float, local_steps: int
    ) -> ClosedRound | list[int] | None:
        """Contribute to a round, and wait a while until it is closed.

        From here on it counts, also if the member dies before the round is closed, unless all do.

        Returns:
            The closed round, without contributors if it is the last and they are not known; or the
            ranks it waits for. None if it was closed before, without this member, or long ago.
        """
        before = number <= self._membership.closed
        if not before:
            self._membership.settle(rank, incarnation, number, local_steps, self.registration.found)
        deadline = time.monotonic() + seconds
        while not self._membership.close(number):
            if time.monotonic() >= deadline:
                return self._membership.pending(number)
            await self._membership.wait(deadline)
        known = self._membership.contributors.get(number)
        if known is None and number == self._membership.closed:  # the head restarted
            known = []
        elif known is None or (before and rank not in known):
            return None
        return ClosedRound(number, known, sign(self._token, number, known))

    async def withdraw(self, rank: int, incarnation: int, number: int) -> None:
        """Have no part in a round, unless it is closed."""
        if number > self._membership.closed:
            self._membership.settle(rank, incarnation, number, None, self.registration.found)
            if not self._membership.close(number):
                self._membership.changed()  # calls that wait for a round to begin again may go on

    def _row(self, rank: int) -> RankProgress:
        """Return how far a rank has come."""
        row = self._rows.get(rank, RankProgress())
        return replace(row, steps=max(row.steps, self._membership.steps_sent(rank)))

    def _note(self, rank: int, incarnation: int, row: RankProgress) -> None:
        known = self._rows.get(rank, RankProgress())
        if incarnation >= known.incarnation and row.exchanges >= known.exchanges:
            self._rows[rank] = replace(row, incarnation=incarnation)

    async def _ask(self) -> None:
        """Ask the shards how far every rank has come."""
        if self.registration.description is None:
            return
        rows, closed = await self._ask_rows(self.registration.description["shards"])
        for rank, row in rows.items():
            self._note(rank, row.incarnation, row)
        self._membership.closed = max(self._membership.closed, closed)
        if not self._known:
            self._known = True
            if self.registration.found:  # the head restarted: the members have to rejoin
                self._membership.quiet_until = time.monotonic() + _REJOIN
            # It had started if any rank has exchanged.
            self._started = self._started or any(row.exchanges for row in rows.values())
