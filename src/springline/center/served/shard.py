"""One part of a center: the rule's `merge` runs here, once per exchange, however often it is asked.

A shard remembers of every rank which exchange it has applied last. A repeat of it is answered and
not applied: with the center as it is now, which is what most rules adopt; where the worker adopts
its message, with `c` as it was before, which is kept until the worker says that it has it (and of
at most a few workers: the others' repeats get the center as it is now). No copy of the model per
worker, but for what each contributes to a round.

Checkpoints are written by a thread of their own. A shard that is started again goes on from the
last one: what it had applied since then is lost, and what workers repeat is applied again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from springline.center.errors import CenterError, forgotten
from springline.center.layout import Bytes, aligned_zeros
from springline.center.plan import Plan, arrays_of, nbytes_of
from springline.center.served.book import Book
from springline.center.served.checkpoints import Checkpoints
from springline.center.served.merger import Merger
from springline.center.served.messages import Message, Reply, Row, Sender, Trouble, cut, span
from springline.center.served.replies import Replies
from springline.center.served.slots import Slots
from springline.center.served.storage import Saved
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
    """

    def __init__(
        self,
        plan: dict[str, Any],
        rule: Rule,
        number: int,
        count: int,
        storage: str | None = None,
        every: tuple[int, float] = (100, 10.0),
    ) -> None:
        self._plan = Plan.from_json(plan)
        self._rule = rule
        self.name = f"shard-{number}"
        runs = cut(self._plan, count)[number]
        self._start, self._stop = span(runs)
        self._center = self._allocate(self._stop - self._start)
        entries = self._plan.state_within(self._start, self._stop)
        self._state = aligned_zeros(nbytes_of(entries))
        self._merger = Merger(self._plan, rule, runs, self._center, arrays_of(entries, self._state))
        self._ready = False
        self.life = uuid.uuid4().hex
        self._began = time.time()
        self._as_of = self._back_to = self._began  # the last exchange; the last before this life
        self._book = Book()
        self._replies = Replies()
        self._slots = Slots()
        self._mean: Reply | None = None  # of the last round that was reduced here
        self._turn = threading.Lock()  # of an exchange, if the center has locks
        self._table = threading.Lock()  # of the slots
        self._problem = CenterError(
            f"{self.name.capitalize()} of the center was started again and has no checkpoint to go "
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
        if any(row.incarnation for row in self._book.rows().values()):
            raise forgotten()
        with self._turn:
            np.copyto(self._center, center)
            np.copyto(self._state, state)
            self._book = Book(steps)
            self._slots = Slots()
            self._ready = True
        self.save()

    def exchange(self, message: Message) -> Reply:
        """Apply a worker's exchange, once."""
        sender = message.sender
        self._check_ready()
        with self._book.alone(sender), self._locked():
            repeat = self._repeat(sender)
            if repeat:
                return repeat
            reply = self._apply(message)
            if self._rule.adopts_message or reply.refused is not None:
                self._replies.keep(sender, reply)
            self._note(sender)
        return reply

    def received(self, rank: int, at: tuple[int, int]) -> None:
        """Forget the reply to an exchange, which its worker has."""
        self._replies.forget(rank, at)

    def discount(self, rank: int, at: tuple[int, int], steps: int, exchanges: int) -> None:
        """Do not count a worker's last exchange, some of whose blocks were refused."""
        self._book.discount(rank, at, steps, exchanges)

    def contribute(self, message: Message, number: int) -> int:
        """Take a worker's message for a round; return the last round that was reduced."""
        self._check(message.sender)
        with self._table:
            self._slots.take(message.sender, message.data, number)
            return self._slots.reduced

    def reduce(self, number: int, contributors: Sequence[int], sender: Sender) -> Reply | list[int]:
        """Reduce a round, unless that is done, and return its mean.

        Args:
            number: of the round.
            contributors: whose messages it is the mean of; none if that is not known any more:
                of those that are here, with whoever asks.
            sender: who asks.

        Returns:
            The ranks whose messages are not here, if any: this shard was started again meanwhile.
        """
        self._check(sender)
        with self._turn:
            missing = self._reduce(number, contributors, sender)
            if missing:
                return missing
            if self._mean is None:
                self._mean = Reply(self.snapshot())
            return self._mean

    def read(self) -> Reply:
        """Return a copy of this part of the center."""
        self._check_ready()
        with self._locked():
            return Reply(self.snapshot())

    def read_all(self) -> tuple[Bytes, Bytes]:
        """Return copies of this part of the center and of the outer optimizer's state."""
        self._check_ready()
        with self._locked():
            return self._center.copy(), self._state.copy()

    def rows(self) -> tuple[dict[int, Row], int]:
        """Return how far each rank has come, and the last round."""
        if self._checkpoints:
            self._check_ready()
        return self._book.rows(), self._slots.reduced

    def save(self) -> None:
        """Write a checkpoint now, if there is a storage; never over what could not be read."""
        if self._checkpoints and self._ready:
            self._checkpoints.save()

    def trouble(self) -> Trouble:
        """Return what whoever watches should know of."""
        failed = self._checkpoints.failed if self._checkpoints else None
        lost = 0 if self._rule.synchronous else self._book.lost  # rounds are made again
        broken = None if self._ready or self._checkpoints else str(self._problem)
        return Trouble(self.life, failed, lost, self._book.had, self._back_to, self._began, broken)

    def _collect(self) -> Saved:
        """Return what a checkpoint holds.

        Without locks an exchange that is under way may be in the center and not in the rows.
        """
        with self._turn:
            here = {"span": [self._start, self._stop], "round": self._slots.reduced}
            header = here | self._book.to_json() | {"time": self._as_of}
            return header, {"center": self._center.copy(), "state": self._state.copy()}

    def _reduce(self, number: int, contributors: Sequence[int], sender: Sender) -> list[int]:
        """Reduce a round, unless that is done; return whose messages are not here."""
        if self._slots.reduced < number:
            with self._table:
                messages = self._slots.of_round(number, contributors, sender.rank)
            if isinstance(messages, list):
                return messages
            self._merge_round(number, messages)
        self._note(sender)
        return []

    def _merge_round(self, number: int, messages: Mapping[int, Bytes]) -> None:
        try:
            for piece in range(self._merger.pieces):
                self._mark(number, piece)
                self._merger.merge_round(list(messages.values()), piece)
        except BaseException:
            self._mark(0, 0)
            raise
        self._mark(number, self._merger.pieces)
        with self._table:
            self._slots.forget(number)
        self._mean = None

    def _mark(self, number: int, pieces: int) -> None:
        """Note how much of the center is a round's mean, for those who look at it meanwhile."""

    def _allocate(self, size: int) -> Bytes:
        """Return memory for the center."""
        return aligned_zeros(size)

    def _repeat(self, sender: Sender) -> Reply | None:
        """Return the answer to an exchange that was applied already."""
        if not self._book.applied(sender):
            return None
        piece = self._book.refused(sender)
        if piece is not None:  # of a stream, whose answer did not arrive
            return Reply(self.snapshot(), self._merger.first_block(piece), known=piece)
        return self._replies.to(sender) or Reply(self.snapshot(), forgotten=True)

    def _apply(self, message: Message) -> Reply:
        # Without locks `c` may move meanwhile; both sides then use the same copy of it.
        unlocked = self._rule.adopts_message and not self._plan.use_locking
        before: Any = None
        if self._rule.adopts_message:
            before = self._center.copy() if unlocked else self.snapshot()
        known = self._book.pieces(message.sender)
        done = max(known, message.had)
        refused = self._merger.apply(message, before if unlocked else None, done)
        if before is None:
            return Reply(self.snapshot(), refused, known=known)
        return Reply(self.send(before) if unlocked else before, refused, known=known)

    def snapshot(self) -> Any:
        """Return a copy of the center as it is sent to workers."""
        return self._center.copy()

    def send(self, copy: Bytes) -> Any:
        """Return a copy of the center that was made before, as it is sent to workers."""
        return copy

    def _check(self, sender: Sender) -> None:
        self._check_ready()
        self._book.check(sender)

    def _check_ready(self) -> None:
        if self._ready:
            return
        with self._restoring:  # what could not be read may be there now
            if not self._ready and self._checkpoints:
                self._restore(self._checkpoints)
        if not self._ready:
            raise self._problem

    def _note(self, sender: Sender, refused: int | None = None) -> None:
        self._book.note(sender, refused)
        self._as_of = time.time()
        if self._checkpoints:
            self._checkpoints.count()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._plan.use_locking or self._rule.synchronous:
            with self._turn:
                yield
        else:
            yield

    def _restore(self, checkpoints: Checkpoints) -> None:
        """Go on from the last checkpoint; what is wrong with it is said to whoever asks."""
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
                f"The checkpoint of {self.name} in {checkpoints.place} is of another model, or of "
                "another number of shards. Give another storage, or the same shards."
            )
            return
        np.copyto(self._center, tensors["center"])
        np.copyto(self._state, tensors["state"])
        self._book = Book.from_json(header)
        self._slots = Slots(header["round"])
        self._as_of = self._back_to = header.get("time", 0.0)
        self._ready = True
