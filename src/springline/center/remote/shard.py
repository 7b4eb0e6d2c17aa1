"""One part of a center: steps run here, exactly once per exchange.

A shard knows which exchange of each rank it has applied last, and answers a retry of it without
applying it again: with the center as it is now, which is what most rules adopt. A worker that
adopts its message needs `c` as it was before, so that reply is kept until the rank's next exchange,
within bounds; a retry of any other gets the center as it is now. No copy of the model is
kept per worker, but for what each contributes to a round.

Checkpoints are written by a thread of their own. A shard that is restarted goes on from the last
one: what it had applied since then is lost, and what workers retry is applied again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from springline.center.layout import Bytes, aligned_zeros
from springline.center.plan import Plan
from springline.center.remote.checkpoints import Checkpoints
from springline.center.remote.ledger import Ledger, Replies, Slots
from springline.center.remote.messages import (
    ClosedRound,
    Message,
    RankProgress,
    Reply,
    Sender,
    Trouble,
    cut,
    of_fragment,
    span,
)
from springline.center.remote.steps import Steps
from springline.center.remote.storage import Saved
from springline.center.state import arrays_of, nbytes_of
from springline.errors import CenterError, forgotten
from springline.rules.outer import Exchange
from springline.rules.rule import Rule


class Shard:
    """One part of a center.

    Args:
        plan: of the whole center, as JSON.
        rule: the workers'.
        number: which part this is.
        count: of how many that were asked for.
        storage: where checkpoints go, if anywhere.
        every: exchanges, and seconds, from one checkpoint to the next, whichever comes first.
        base: exchanges (rounds) before the center was made, of the checkpoint that it began with.

    Attributes:
        plan: of the whole center.
        ranges: what this part holds of the layout.
    """

    calls: ClassVar[tuple[str, ...]] = (
        *("initialise", "seal", "exchange", "discount", "contribute", "reduce"),
        *("read", "read_all", "published", "rows", "save", "trouble"),
    )

    def __init__(
        self,
        plan: dict[str, Any],
        rule: Rule,
        number: int,
        count: int,
        storage: str | None = None,
        every: tuple[int, float] = (100, 10.0),
        base: int = 0,
    ) -> None:
        self._base = base
        self.plan = Plan.from_json(plan)
        self._rule = rule
        self.name = f"shard-{number}"
        self.ranges = ranges = cut(self.plan, count)[number]
        count = self.plan.layout.fragments
        self._fragments = [of_fragment(ranges, fragment) for fragment in range(count)]
        self._start, self._stop = span(ranges)
        self._center = aligned_zeros(self._stop - self._start)
        entries = self.plan.state_within(self._start, self._stop)
        self._state = aligned_zeros(nbytes_of(entries))
        arrays = arrays_of(entries, self._state)
        self._steps = [
            Steps(self.plan, rule, mine, self._part(self._center, fragment), arrays)
            for fragment, mine in enumerate(self._fragments)
        ]
        self._ready = False
        self.incarnation = uuid.uuid4().hex
        self._ledger = Ledger()
        self._replies = Replies(len(self._center))
        self._slots = Slots()
        self._lease = 0  # of the last worker that has sent first values
        self._mean: tuple[int, Reply] | None = None  # the last round that was reduced here, and it
        self._turn = threading.Lock()  # of an exchange
        self._problem = CenterError(
            f"{self.name.capitalize()} of the center restarted and has no checkpoint to go "
            "on from. Start a new run, with a storage (`--storage`)."
        )
        self._restoring = threading.Lock()
        self._checkpoints: Checkpoints | None = None
        if storage:
            self._checkpoints = Checkpoints(self.name, storage, every, self._collect)
            self._restore(self._checkpoints)

    def initialise(self, center: Bytes, state: Bytes, steps: Sequence[int] = ()) -> None:
        """Give a new center its first values; they are in the storage when this returns."""
        if self._checkpoints:
            self._checkpoints.open()
        if any(row.incarnation for row in self._ledger.rows().values()):
            raise forgotten()
        with self._turn:
            np.copyto(self._center, center)
            np.copyto(self._state, state)
            self._ledger = Ledger({rank: RankProgress(steps=n) for rank, n in enumerate(steps)})
            self._slots = Slots()
            self._ready = True
        self.save()

    def seal(self, lease: int, center: Bytes) -> bool:
        """Take new first values; False if a later lease has given some, or a rank has exchanged."""
        with self._turn:
            if lease < self._lease or any(row.exchanges for row in self._ledger.rows().values()):
                return False
            self._lease = lease
            np.copyto(self._center, center)
        self.save()
        return True

    def exchange(self, message: Message) -> Reply:
        """Apply a worker's exchange, once."""
        sender, steps = message.sender, self._steps[message.fragment]
        self._check_ready()
        with self._turn:  # a retry may arrive while its exchange is applied
            self._ledger.check(sender)
            if self._ledger.applied(sender):
                return self._replies.to(sender) or Reply(steps.published(), forgotten=True)
            self._replies.forget(sender.rank)
            before = self._ledger.rows().get(sender.rank, RankProgress())
            done, staleness = self._ledger.count(sender)
            exchange = Exchange(number=self._base + done, staleness=staleness)
            reply = steps.exchange(message, exchange)
            if self._rule.adopts_seen or reply.refused:
                self._replies.keep(sender, reply)
            self._note(sender)
            if reply.refused:
                self.discount(sender.counted_as(before))
        return reply

    def discount(self, sender: Sender) -> None:
        """Do not count a worker's last exchange, some of whose blocks were refused.

        Args:
            sender: of that exchange, with the steps and exchanges before it.
        """
        self._ledger.discount(sender)

    def contribute(self, message: Message, number: int) -> None:
        """Take a worker's message for a round."""
        self._check(message.sender)
        if message.fragment != self._fragment(number):
            raise CenterError(
                f"Round {number} is of fragment {self._fragment(number)}. Rank "
                f"{message.sender.rank} has sent fragment {message.fragment}."
            )
        self._slots.take(message, number)

    def reduce(
        self, closed: ClosedRound, sender: Sender, without: Sequence[int] = ()
    ) -> Reply | list[int]:
        """Reduce a round, unless that is done, and return its mean.

        Args:
            closed: the round. If its contributors are not known any more: of the messages that are
                here, with the sender's.
            sender: the worker that asks.
            without: contributors that do not send again what a shard has lost in a restart.

        Returns:
            The ranks whose messages are not here, if any: this shard restarted meanwhile.
        """
        self._check(sender)
        number, contributors = closed.number, closed.contributors
        if self._ledger.restarted:
            contributors = [rank for rank in contributors if rank not in without]
        steps = self._steps[self._fragment(number)]
        with self._turn:
            if self._slots.reduced < number:
                messages, missing = self._slots.of_round(number, contributors, sender.rank)
                if missing:
                    return missing
                refused = steps.round(messages, self._base + number - 1)
                self._slots.forget(number)  # before anything else can fail: it is in the center
                self._mean = number, Reply(steps.published(), refused)
            self._note(sender)
            if self._mean is None or self._mean[0] != number:  # it may be of another fragment
                return Reply(steps.published())
            return self._mean[1]

    def read(self) -> Reply:
        """Return a copy of this part of the center."""
        self._check_ready()
        with self._turn:
            return Reply(self._center.copy())

    def published(self) -> Reply:
        """Return a copy of what workers are given for this part of the center."""
        self._check_ready()
        with self._turn:
            out = aligned_zeros(len(self._center))
            for fragment, steps in enumerate(self._steps):
                self._part(out, fragment)[:] = steps.published()
            return Reply(out)

    def read_all(self) -> tuple[Bytes, Bytes]:
        """Return copies of this part of the center and of the outer optimizer's state."""
        self._check_ready()
        with self._turn:
            return self._center.copy(), self._state.copy()

    def rows(self) -> tuple[dict[int, RankProgress], int]:
        """Return how far each rank has come, and the last round."""
        if self._checkpoints:
            self._check_ready()
        return self._ledger.rows(), self._slots.reduced

    def save(self) -> None:
        """Write a checkpoint now, if there is a storage; never over what could not be read."""
        if self._checkpoints and self._ready:
            self._checkpoints.save()

    def trouble(self) -> Trouble:
        """Return what the launcher should report."""
        failed = self._checkpoints.failed if self._checkpoints else None
        lost = 0 if self.plan.rounds else self._ledger.lost  # rounds are made again
        return Trouble(self.incarnation, failed, lost)

    def _collect(self) -> Saved:
        """Return what a checkpoint holds: center, state and rows of one moment."""
        with self._turn:
            header = {
                "span": [self._start, self._stop],
                "round": self._slots.reduced,
                "rows": self._ledger.to_json(),
            }
            return header, {"center": self._center.copy(), "state": self._state.copy()}

    def _part(self, buffer: Bytes, fragment: int) -> Bytes:
        """Return a fragment's bytes of a buffer like this part of the center."""
        start, stop = span(self._fragments[fragment])
        return buffer[start - self._start : stop - self._start] if stop else buffer[:0]

    def _fragment(self, number: int) -> int:
        """Return the fragment that a round is of."""
        return (self._base + number - 1) % len(self._fragments)

    def _check(self, sender: Sender) -> None:
        self._check_ready()
        self._ledger.check(sender)

    def _check_ready(self) -> None:
        if self._ready:
            return
        with self._restoring:  # what could not be read may be there now
            if not self._ready and self._checkpoints:
                self._restore(self._checkpoints)
        if not self._ready:
            raise self._problem

    def _note(self, sender: Sender) -> None:
        self._ledger.note(sender)
        if self._checkpoints:
            self._checkpoints.count()

    def _restore(self, checkpoints: Checkpoints) -> None:
        """Go on from the last checkpoint; what is wrong with it is raised by the next call."""
        try:
            saved = checkpoints.read()
        except CenterError as error:
            self._problem = error
            return
        if saved is None:
            return
        header, tensors = saved
        if header["span"] != [self._start, self._stop]:  # a new center may replace it
            self._problem = CenterError(
                f"The checkpoint of {self.name} in {checkpoints.place} belongs to another "
                "model, or to another number of shards. Give another storage, or the same shards."
            )
            return
        np.copyto(self._center, tensors["center"])
        np.copyto(self._state, tensors["state"])
        self._ledger = Ledger.from_json(header["rows"])
        self._slots = Slots(header["round"])
        self._ready = True
