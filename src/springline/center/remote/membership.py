"""The members of a remote center and the round they are in, as its head knows them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from springline.center.token import issue
from springline.errors import CenterError

TICK = 0.25  # seconds between two looks at which members are alive
_KNOWN = 10  # rounds whose contributors are remembered


class NotAMemberError(CenterError):
    """The head does not know this member any more."""


@dataclass
class MemberState:
    """What the head knows of a member."""

    incarnation: int
    heard: float
    settled: int  # the round it has contributed to or withdrawn from
    joined: bool = False
    speed: float = 0.0  # local steps per second


@dataclass(frozen=True)
class Lease:
    """The right to give a new center its first values; a later lease fences off an earlier one."""

    rank: int = -1
    incarnation: int = 0
    number: int = 0


@dataclass(frozen=True)
class Contribution:
    """A rank's complete part in a round."""

    number: int  # of the round
    steps: int  # of the rank, with this
    incarnation: int


class Membership:
    """All members, dead or alive.

    Attributes:
        members: by rank.
        quiet_until: no round is closed before.
        closed: the last round that was.
        contributors: of the last few rounds.
        sent: by rank, its last contribution. It outlives the member: what is complete counts, if
            there are others in the round to reduce it.
    """

    def __init__(self, grace: float, token: str) -> None:
        self.members: dict[int, MemberState] = {}
        self.quiet_until = 0.0
        self.closed = 0
        self.contributors: dict[int, list[int]] = {}
        self.sent: dict[int, Contribution] = {}
        self._grace = grace
        self._token = token
        self._lease = Lease()
        self._change = asyncio.Event()
        self._ticking: asyncio.Future[None] | None = None

    def is_alive(self, member: MemberState) -> bool:
        """Whether it sent a heartbeat lately."""
        return time.monotonic() - member.heard < self._grace

    def alive(self) -> list[int]:
        """Return the ranks with a recent heartbeat."""
        return sorted(rank for rank, member in self.members.items() if self.is_alive(member))

    def find(self, rank: int, incarnation: int) -> MemberState | None:
        """Return a member; None if it is not one, or another has the rank."""
        member = self.members.get(rank)
        return member if member and member.incarnation == incarnation else None

    def member(self, rank: int, incarnation: int) -> MemberState:
        """Return a member.

        Raises:
            NotAMemberError: it is not one.
        """
        member = self.find(rank, incarnation)
        if member is None:
            raise NotAMemberError("The head does not know this member; it has to rejoin.")
        return member

    def lease(
        self, rank: int, incarnation: int, changed: bool, held: int
    ) -> tuple[str, int] | None:
        """Return what a member has to do before it seals the center; see `Head.seal`."""
        holder = self.find(self._lease.rank, self._lease.incarnation)
        if holder and self.is_alive(holder) and self._lease.rank != rank:
            return "wait", self._lease.rank
        # A member that had a lease and died may have sent some of its values.
        if (changed or self._lease.number) and not (held and held == self._lease.number):
            self._lease = Lease(rank, incarnation, issue(self._token, "lease"))
            return "send", self._lease.number
        return None

    def pending(self, number: int) -> list[int]:
        """Return the ranks that a round waits for."""
        return [rank for rank in self.alive() if self.members[rank].settled < number]

    def contributing(self, number: int) -> list[int]:
        """Return the ranks that have contributed to a round, also those that have died since."""
        return sorted(rank for rank, sent in self.sent.items() if sent.number == number)

    def reducing(self, number: int) -> list[int]:
        """Return the ranks that have contributed to a round and are alive, to reduce it."""
        members = ((rank, self.find(rank, self.sent[rank].incarnation)) for rank in self.sent)
        alive = [rank for rank, member in members if member and self.is_alive(member)]
        return [rank for rank in self.contributing(number) if rank in alive]

    def missing(self, workers: int) -> list[int]:
        """Return the ranks that have not joined, or are not there any more."""
        here = {rank for rank in self.alive() if self.members[rank].joined}
        return sorted(set(range(workers)) - here)

    def settle(
        self, rank: int, incarnation: int, number: int, steps: int | None, restarted: bool
    ) -> None:
        """Note that a member has contributed to a round, or withdrawn from it.

        Args:
            rank: the member's.
            incarnation: the member's.
            number: of the round.
            steps: its steps with its contribution; None if it withdraws.
            restarted: whether the head was, and may know less of the rounds than the member.
        """
        member, this = self.member(rank, incarnation), self.closed + 1
        if number > this and not restarted:
            raise CenterError(f"Round {number} is not open: this is round {this}. Begin it first.")
        if number > this:  # the shards restarted, too
            self.closed = number - 1
            self.changed()
        member.settled = number
        if steps is None:
            self.sent.pop(rank, None)
        else:
            self.sent[rank] = Contribution(number, steps, incarnation)

    def steps_sent(self, rank: int) -> int:
        """Return a rank's steps with its last contribution, if that was to a closed round."""
        sent = self.sent.get(rank)
        return sent.steps if sent and sent.number <= self.closed else 0

    def begin_again(self, number: int) -> None:
        """Open a round again that no rank would reduce: all have withdrawn or died."""
        for rank in self.contributing(number):
            del self.sent[rank]
        for member in self.members.values():
            member.settled = number - 1
        self.changed()

    def close(self, number: int) -> bool:
        """Close a round that is complete and has a rank to reduce it; whether it is closed."""
        waits = time.monotonic() < self.quiet_until or self.pending(number)
        if self.closed < number and not waits and self.reducing(number):
            self.closed = number
            self.contributors[number] = self.contributing(number)
            self.contributors.pop(number - _KNOWN, None)
            self.changed()
        return self.closed >= number

    def changed(self) -> None:
        """Wake all calls that wait."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait(self, deadline: float) -> None:
        """Wait for a change, or until then."""
        if self._ticking is None:
            self._ticking = asyncio.ensure_future(self._tick())
        waiting = asyncio.ensure_future(self._change.wait())
        await asyncio.wait([waiting], timeout=max(0.0, deadline - time.monotonic()))
        waiting.cancel()

    async def _tick(self) -> None:
        """Wake them when a member falls silent, which is not reported."""
        last: list[int] = []
        while True:
            alive = self.alive()
            quiet = time.monotonic() < self.quiet_until + 2 * TICK
            if alive != last or quiet:
                last = alive
                self.changed()
            await asyncio.sleep(TICK)
