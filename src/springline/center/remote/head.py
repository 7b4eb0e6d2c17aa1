"""The head of a remote center: who is a member, how far each rank has come, which round it is.

It holds no parameters. Members say again and again that they are alive; one that has not for
`GRACE` seconds, or of which whoever started it says that it is gone, is no longer waited for. If
the head itself is started again, it asks the shards how far everybody has come, and the members
join anew when they next say that they are alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from springline.center.plan import Plan
from springline.center.remote.founding import Founding
from springline.center.remote.messages import ClosedRound, Row
from springline.center.remote.seats import Seat, Seats
from springline.center.token import issue, sign
from springline.errors import (
    CenterError,
    EndedError,
    forgotten,
    rank_in_use,
    taken_over,
)

BEAT = 0.5  # seconds between two signs of life of a member
GRACE = 10.0  # seconds without one after which a member counts as dead
_SIGNS = 3  # of life, one after another; those of a dead worker may still arrive, all at once
_TICK = 0.25  # seconds between two looks at who is alive
_ANEW = 4 * BEAT  # seconds that members have to join a head that was started again
AskRows = Callable[[int], Awaitable[tuple[dict[int, Row], int]]]


@dataclass
class Look:
    """What the head knows, for whoever asks."""

    members: list[int]
    rows: dict[int, Row]  # as of the members' last signs of life
    closed: int  # the last closed round
    description: dict[str, Any]
    finished: list[int]  # ranks that have made all their steps
    given_up: list[int] | None  # ranks that the launcher does not start again, if there is one


class Head(Founding):
    """The head of one center.

    Args:
        ask_rows: asks the shards, of which it is told how many there are, for their rows.
        storage: where it writes down what the center is, if anywhere.
        grace: seconds without a heartbeat after which a member counts as dead.
        name: the center's.
        token: the center's, to sign with what is given out.
    """

    calls: ClassVar[tuple[str, ...]] = (
        *("find", "look", "stay", "sealed", "seal"),
        *("join", "joined", "beat", "leave", "finish", "barrier"),
        *("begin", "contribute", "withdraw", "waiting"),
    )

    def __init__(
        self,
        ask_rows: AskRows,
        storage: str | None = None,
        grace: float = GRACE,
        name: str = "center",
        token: str = "",
    ) -> None:
        super().__init__(storage, name)
        self._token = token
        self._ask_rows = ask_rows
        self._grace = grace
        self._seats = Seats(grace, token)
        self._plan: Plan | None = None
        self._known = False  # whether the rows are those of the shards
        self._rows: dict[int, Row] = {}
        self._started = False
        self._finished: set[int] = set()
        self._given_up: tuple[float, list[int]] | None = None  # when a launcher said so, and whom
        self._change = asyncio.Event()
        self._ticking: asyncio.Future[None] | None = None
        self._ending = False

    async def look(self) -> Look | None:
        """Return what is known; None while there is no center."""
        if not self.is_there() or self.description is None:
            return None
        if not self._known:
            await self._ask()
        at, given_up = self._given_up or (-GRACE, None)
        return Look(
            self._seats.alive(),
            dict(self._rows),
            self._seats.closed,
            self.description,
            sorted(self._finished),
            given_up if time.monotonic() - at < GRACE else None,
        )

    async def stay(self, given_up: list[int] | None = None) -> None:
        """Hear of a launcher, and of the ranks that it does not start again."""
        if given_up is not None:
            self._given_up = time.monotonic(), given_up

    # The first values.

    async def sealed(self) -> int:
        """Return how the center was sealed (see `Member.seal`): a mark, or 1; 0 if it is not."""
        base = int((self.description or {}).get("base", 0))
        done = base or any(row.exchanges for row in self._rows.values())
        return self._seal[0] or int(bool(done))

    async def seal(
        self, rank: int, incarnation: int, mark: int, changed: bool, held: int
    ) -> tuple[str, int]:
        """Let a worker seal a new center; others wait meanwhile.

        Args:
            rank: the worker's.
            incarnation: the worker's.
            mark: what tells its parameters from others.
            changed: whether the shards have others.
            held: the lease under which it has sent its parameters to the shards; 0 if it has not.

        Returns:
            "done"; "sealed", and the mark of who did; "send", and a lease; "wait", and for whom.
        """
        self._seats.member(rank, incarnation)
        me = [mark, rank, incarnation]
        if by := await self.sealed():
            return ("done", 0) if self._seal == me else ("sealed", by)
        # A head that was restarted does not know who had a lease, and may have sent some values.
        if to_do := self._seats.lease(rank, incarnation, changed or self.found, held):
            return to_do
        await self.publish({**(self.description or {}), "seal": me})
        return "done", 0

    # Members.

    async def join(self, rank: int, incarnation: int | None = None) -> tuple[int, Row, int]:
        """Take a seat: at once if it is free, else when its holder turns out to be dead.

        Args:
            rank: the worker's.
            incarnation: of a member that the head has forgotten, or taken for dead.

        Returns:
            The incarnation, how far the rank has come, and the last closed round.
        """
        if self._ending:
            raise EndedError("The center is being ended. Start the run again.")
        if not self.is_there():
            raise self.problem or forgotten()
        await self._ask()  # its last life may have said less to us than to the shards
        signs: set[float] = set()
        while (holder := self._seats.of.get(rank)) and holder.incarnation != incarnation:
            if not self._seats.is_alive(holder):
                break
            signs.add(holder.heard)
            if len(signs) > _SIGNS:
                raise rank_in_use(rank, self._seats.alive())
            await self._wait(time.monotonic() + _TICK)
        row = self._rows.get(rank, Row())
        if holder and holder.incarnation == incarnation:
            holder.heard = time.monotonic()  # it keeps its part in the round
            return incarnation, row, self._seats.closed
        new = incarnation is None
        if incarnation is None:
            incarnation = issue(self._token, f"rank {rank}", after=row.incarnation)
        elif incarnation < max(row.incarnation, holder.incarnation if holder else 0):
            raise taken_over(rank)
        self._finished.discard(rank)
        this = self._seats.closed + 1
        late = new and bool(self._seats.contributing(this))  # it is in the next round
        settled = this if late else this - 1
        self._seats.of[rank] = Seat(incarnation, time.monotonic(), settled)
        self._note(rank, incarnation, row)
        self._changed()
        return incarnation, row, self._seats.closed

    async def joined(self, rank: int, incarnation: int) -> None:
        """Count a member in for the barrier."""
        seat = self._seats.find(rank, incarnation)
        if seat:
            seat.joined = True
            self._changed()

    async def beat(self, rank: int, incarnation: int, row: Row) -> bool:
        """Hear that a member is alive and how far it has come; False if it has to join anew."""
        seat = self._seats.find(rank, incarnation)
        if seat is None:
            return False
        seat.heard = time.monotonic()
        self._note(rank, incarnation, row)
        return True

    async def leave(self, rank: int, incarnation: int | None, finished: bool = False) -> None:
        """Give a rank back; without an incarnation, whoever has it is known to be dead."""
        seat = self._seats.of.get(rank)
        if finished and incarnation is not None:
            await self.finish(rank, incarnation)
        if seat and incarnation in (None, seat.incarnation):
            del self._seats.of[rank]
            self._changed()

    async def finish(self, rank: int, incarnation: int) -> None:
        """Note that a rank has finished, unless it has come back since."""
        seat = self._seats.of.get(rank)
        if seat is None or seat.incarnation <= incarnation:
            self._finished.add(rank)

    async def barrier(self, seconds: float) -> list[int]:
        """Wait a while until all ranks are there at once, or have been; return the missing."""
        missing: list[int] = []
        deadline = time.monotonic() + seconds
        while not self._started:
            here = {rank for rank in self._seats.alive() if self._seats.of[rank].joined}
            missing = sorted(set(range(self.plan.workers if self.plan else 0)) - here)
            self._started = not missing
            if self._started:
                self._changed()
            elif time.monotonic() >= deadline:
                return missing
            else:
                await self._wait(deadline)
        return []

    # Rounds.

    async def begin(self, rank: int, incarnation: int, seconds: float) -> int | list[int]:
        """Wait a while for a round to contribute to; return it, or who is waited for."""
        deadline = time.monotonic() + seconds
        while True:
            seat, this = self._seats.member(rank, incarnation), self._seats.closed + 1
            if seat.settled < this:
                return this
            pending = self._seats.pending(this)
            if not pending and not self._seats.contributing(this):
                for other in self._seats.of.values():
                    other.settled = this - 1  # all withdrew: it begins again
                self._changed()
            elif not self._close(this):
                if time.monotonic() >= deadline:
                    return pending or self._seats.contributing(this)
                await self._wait(deadline)

    async def contribute(
        self, rank: int, incarnation: int, number: int, seconds: float
    ) -> ClosedRound | list[int] | None:
        """Contribute to a round, and wait a while until it is closed.

        Returns:
            The closed round, without contributors if it is the last and they are not known; or who
            is waited for. None if it was closed before, without this member, or long ago. Who is
            taken for dead while it waits has no part in it, and gets the others' mean.
        """
        before = number <= self._seats.closed
        if not before:
            self._settle(rank, incarnation, number).contributed = number
        deadline = time.monotonic() + seconds
        while not self._close(number):
            if time.monotonic() >= deadline:
                return self._seats.pending(number)
            await self._wait(deadline)
        known = self._seats.contributors.get(number)
        if known is None and number == self._seats.closed:  # we were started again
            known = []
        elif known is None or (before and rank not in known):
            return None
        return ClosedRound(number, known, sign(self._token, number, known))

    async def withdraw(self, rank: int, incarnation: int, number: int) -> None:
        """Have no part in a round, unless it is closed."""
        if number > self._seats.closed:
            self._settle(rank, incarnation, number).contributed = 0
            if not self._close(number):
                self._changed()  # those who wait for a round to begin again may go on

    async def waiting(self) -> list[int]:
        """Return who has contributed to the round that is open."""
        return self._seats.contributing(self._seats.closed + 1)

    def _settle(self, rank: int, incarnation: int, number: int) -> Seat:
        seat, this = self._seats.member(rank, incarnation), self._seats.closed + 1
        if number > this and not self.found:
            raise CenterError(f"Round {number} is not open: this is round {this}. Begin it first.")
        if number > this:  # we were started again, and so were the shards
            self._seats.closed = number - 1
            self._changed()
        seat.settled = number
        return seat

    def _close(self, number: int) -> bool:
        """Close a round if it waits for nobody; return whether it is closed."""
        if self._seats.close(number):
            self._changed()
        return self._seats.closed >= number

    def _note(self, rank: int, incarnation: int, row: Row) -> None:
        known = self._rows.get(rank, Row())
        if incarnation >= known.incarnation and row.exchanges >= known.exchanges:
            self._rows[rank] = Row(incarnation, row.number, row.steps, row.exchanges, row.seconds)

    @property
    def _seal(self) -> list[int]:
        """The mark, rank and incarnation of who has sealed the center."""
        return list((self.description or {}).get("seal", [0, 0, 0]))

    @property
    def plan(self) -> Plan | None:
        """The center's; None before it is made."""
        if self._plan is None and self.description:
            self._plan = Plan.from_json(self.description["plan"])
        return self._plan

    async def _ask(self) -> None:
        """Ask the shards how far everybody has come."""
        if self.description is None:
            return
        rows, closed = await self._ask_rows(self.description["shards"])
        for rank, row in rows.items():
            self._note(rank, row.incarnation, row)
        self._seats.closed = max(self._seats.closed, closed)
        if not self._known:
            self._known = True
            if self.found:  # we were started again: the members have to join anew
                self._seats.quiet_until = time.monotonic() + _ANEW
            # It had started if anybody has exchanged.
            self._started = self._started or any(row.exchanges for row in rows.values())

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _wait(self, deadline: float) -> None:
        """Wait for a change, or until then."""
        if self._ticking is None:
            self._ticking = asyncio.ensure_future(self._tick())
        waiting = asyncio.ensure_future(self._change.wait())
        await asyncio.wait([waiting], timeout=max(0.0, deadline - time.monotonic()))
        waiting.cancel()

    async def _tick(self) -> None:
        """Look who is alive, for all who wait: nobody says that a member has died."""
        last: list[int] = []
        while True:
            alive = self._seats.alive()
            quiet = time.monotonic() < self._seats.quiet_until + 2 * _TICK
            if alive != last or quiet:
                last = alive
                self._changed()
            await asyncio.sleep(_TICK)
