"""The head of a served center: who is a member, how far each rank has come, which round it is.

It holds no parameters. A member says every second that it is alive; one that has not for `GRACE`
seconds, or of which whoever started it says that it is gone, is no longer waited for. If the head
itself is started again, it asks the shards how far everybody has come, and the members join anew
when they next say that they are alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from springline.center.errors import CenterError, rank_in_use
from springline.center.served.messages import Row
from springline.center.served.storage import Storage

BEAT = 0.5  # seconds between two signs of life of a member
GRACE = 10.0  # seconds without one after which a member counts as dead
_TICK = 0.25  # seconds between two looks at who is alive
_NAME = "head"
AskRows = Callable[[int], Awaitable[tuple[dict[int, Row], int]]]


@dataclass
class Seat:
    """A member, as the head sees it."""

    incarnation: int
    heard: float
    settled: int  # the round it has contributed to or withdrawn from
    contributed: int = 0
    joined: bool = False


@dataclass
class Look:
    """What the head knows, for whoever asks."""

    members: list[int]
    rows: dict[int, Row]  # as of the members' last signs of life
    closed: int  # the last closed round
    description: dict[str, Any]


class Head:
    """The head of one center.

    Args:
        ask_rows: asks the shards, of which it is told how many there are, for their rows.
        storage: where it writes down what the center is, if anywhere.
        grace: seconds without a sign of life after which a member counts as dead.
    """

    def __init__(self, ask_rows: AskRows, storage: str | None = None, grace: float = GRACE) -> None:
        self._ask_rows = ask_rows
        self._grace = grace
        self._storage: Storage | None = None
        self._description: dict[str, Any] | None = None
        self._problem: CenterError | None = None  # with the storage, said to whoever comes
        if storage:
            self._open(storage)
        self._known = self._description is None  # whether the rows are those of the shards
        self._creator: tuple[str, float] | None = None
        self._rows: dict[int, Row] = {}
        self._seats: dict[int, Seat] = {}
        self._started = False
        self._closed = 0
        self._contributors: dict[int, list[int]] = {}
        self._change = asyncio.Event()

    # How a center comes to be.

    async def claim(self, who: str) -> dict[str, Any] | None:
        """Wait for the center; or return None to one caller, who is to make it and to `publish`.

        Should that one fail to within the grace, after its last word, another may.
        """
        if self._problem:
            raise self._problem
        while self._description is None:
            now = time.monotonic()
            if self._creator is None or who == self._creator[0] or now > self._creator[1]:
                self._creator = who, now + max(self._grace, 30.0)
                return None
            await asyncio.sleep(_TICK)
        return self._description

    async def publish(self, who: str, description: dict[str, Any]) -> bool:
        """Let the center be there; False if another has made it meanwhile."""
        if self._description is not None or self._creator is None or self._creator[0] != who:
            return False
        if self._storage:
            self._storage.write(_NAME, description)
        self._description = description
        self._known = False
        await self._know()
        return True

    async def release(self, who: str) -> None:
        """Let another make the center: this one could not."""
        if self._creator and self._creator[0] == who:
            self._creator = None

    async def look(self) -> Look | None:
        """Return what is known; None while there is no center."""
        if self._description is None:
            return None
        await self._know()
        return Look(self._alive(), dict(self._rows), self._closed, self._description)

    # Members.

    async def join(self, rank: int, incarnation: int | None = None) -> tuple[int, Row, int]:
        """Take a seat: at once if it is free, else when its holder turns out to be dead.

        Args:
            rank: the worker's.
            incarnation: of a member that the head has forgotten, or taken for dead.

        Returns:
            The incarnation, how far the rank has come, and the last closed round.
        """
        await self._ask()  # its last life may have said less to us than to the shards
        holder = self._seats.get(rank)
        if holder and incarnation != holder.incarnation:
            heard = holder.heard
            while self._seats.get(rank) is holder and self._is_alive(holder):
                if holder.heard > heard:
                    raise rank_in_use(rank, self._alive())
                await self._wait()
        row = self._rows.get(rank, Row())
        if incarnation is None:
            incarnation = max(row.incarnation + 1, time.time_ns())
        elif incarnation < max(row.incarnation, holder.incarnation if holder else 0):
            raise CenterError(
                f"Rank {rank} has been taken over by another worker meanwhile (this one was not "
                "heard of for too long). Start it again to take part."
            )
        this = self._closed + 1
        busy = any(s.contributed == this for s in self._seats.values() if self._is_alive(s))
        self._seats[rank] = Seat(incarnation, time.monotonic(), this if busy else this - 1)
        self._note(rank, incarnation, row)
        self._changed()
        return incarnation, row, self._closed

    async def joined(self, rank: int, incarnation: int) -> None:
        """Count a member in for the barrier."""
        seat = self._seat(rank, incarnation)
        if seat:
            seat.joined = True
            self._changed()

    async def beat(self, rank: int, incarnation: int, row: Row) -> bool:
        """Hear that a member is alive and how far it has come; False if it has to join anew."""
        seat = self._seat(rank, incarnation)
        if seat is None or not self._is_alive(seat):
            return False
        seat.heard = time.monotonic()
        self._note(rank, incarnation, row)
        return True

    async def leave(self, rank: int, incarnation: int | None) -> None:
        """Give a rank back; without an incarnation, whoever has it is known to be dead."""
        seat = self._seats.get(rank)
        if seat and incarnation in (None, seat.incarnation):
            del self._seats[rank]
            self._changed()

    async def barrier(self, seconds: float) -> list[int]:
        """Wait a while until all ranks are there at once, or have been; return the missing."""
        missing: list[int] = []
        deadline = time.monotonic() + seconds
        while not self._started:
            here = {rank for rank in self._alive() if self._seats[rank].joined}
            missing = sorted(set(range(self._workers)) - here)
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
            seat, this = self._member(rank, incarnation), self._closed + 1
            if seat.settled < this:
                return this
            pending = self._pending(this)
            if not pending and not self._contributing(this):
                for other in self._seats.values():
                    other.settled = this - 1  # all withdrew: it begins again
                self._changed()
            elif not self._close(this):
                if time.monotonic() >= deadline:
                    return pending
                await self._wait(deadline)

    async def settle(self, rank: int, incarnation: int, number: int, contributed: bool) -> bool:
        """Contribute to a round, or withdraw from it; False if it was closed before."""
        if number <= self._closed:
            return rank in self._contributors.get(number, [])
        seat = self._member(rank, incarnation)
        seat.settled = number
        seat.contributed = number if contributed else 0
        self._close(number)
        self._changed()
        return True

    async def closed(self, number: int, seconds: float) -> tuple[list[int], list[int]]:
        """Wait a while until a round is closed; return its contributors, or who is waited for."""
        deadline = time.monotonic() + seconds
        while not self._close(number):
            if time.monotonic() >= deadline:
                return [], self._pending(number)
            await self._wait(deadline)
        return self._contributors.get(number, []), []

    async def waiting(self) -> list[int]:
        """Return who has contributed to the round that is open."""
        return self._contributing(self._closed + 1)

    def _open(self, place: str) -> None:
        try:
            self._storage = Storage(place)
            saved = self._storage.read(_NAME)
            self._description = saved[0] if saved else None
        except CenterError as error:
            self._problem = error

    def _close(self, number: int) -> bool:
        if self._closed < number and not self._pending(number):
            contributors = self._contributing(number)
            if contributors:
                self._closed = number
                self._contributors[number] = contributors
                self._contributors.pop(number - 10, None)
                self._changed()
        return self._closed >= number

    def _pending(self, number: int) -> list[int]:
        return [rank for rank in self._alive() if self._seats[rank].settled < number]

    def _contributing(self, number: int) -> list[int]:
        return [rank for rank in self._alive() if self._seats[rank].contributed == number]

    def _alive(self) -> list[int]:
        return sorted(rank for rank, seat in self._seats.items() if self._is_alive(seat))

    def _is_alive(self, seat: Seat) -> bool:
        return time.monotonic() - seat.heard < self._grace

    def _seat(self, rank: int, incarnation: int) -> Seat | None:
        seat = self._seats.get(rank)
        return seat if seat and seat.incarnation == incarnation else None

    def _member(self, rank: int, incarnation: int) -> Seat:
        seat = self._seat(rank, incarnation)
        if seat is None:
            raise NotAMemberError("The head does not know this member; it has to join anew.")
        return seat

    def _note(self, rank: int, incarnation: int, row: Row) -> None:
        known = self._rows.get(rank, Row())
        if incarnation >= known.incarnation and row.exchanges >= known.exchanges:
            self._rows[rank] = Row(incarnation, row.number, row.steps, row.exchanges, row.seconds)

    @property
    def _workers(self) -> int:
        return int(self._description["plan"]["settings"]["workers"]) if self._description else 0

    async def _know(self) -> None:
        """Ask the shards how far everybody has come, if we have not yet."""
        if not self._known:
            await self._ask()

    async def _ask(self) -> None:
        if self._description is None:
            return
        rows, closed = await self._ask_rows(self._description["shards"])
        for rank, row in rows.items():
            self._note(rank, row.incarnation, row)
        if not self._known:
            self._known = True
            self._closed = max(self._closed, closed)
            # It had started if anybody has exchanged.
            self._started = self._started or any(row.exchanges for row in rows.values())

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _wait(self, deadline: float | None = None) -> None:
        """Wait for a change; for a short while, since nobody says that a member has died."""
        left = _TICK if deadline is None else min(_TICK, max(0.0, deadline - time.monotonic()))
        waiting = asyncio.ensure_future(self._change.wait())
        await asyncio.wait([waiting], timeout=left)
        waiting.cancel()


class NotAMemberError(CenterError):
    """The head does not know a member any more."""


def latest(found: Sequence[tuple[dict[int, Row], int]]) -> tuple[dict[int, Row], int]:
    """Return of what the shards know of each rank the latest."""
    rows: dict[int, Row] = {}
    for shard, _ in found:
        for rank, row in shard.items():
            known = rows.get(rank, row)
            rows[rank] = max(known, row, key=lambda r: (r.exchanges, r.steps, r.incarnation))
    return rows, max((closed for _, closed in found), default=0)
