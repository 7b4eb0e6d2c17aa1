"""One part of a center: the rule's `merge` runs here, once per exchange, however often it is asked.

A shard remembers of every rank which exchange it has applied last. A repeat of it gets the same
answer again. Where the worker adopts its message, that answer is `c` as it was before, which is
kept until the worker says that it has it (and of at most a few workers: the others' repeats get the
center as it is now). No copy of the model per worker.

Checkpoints are written by a thread of their own. A shard that is started again goes on from the
last one: what it had applied since then is lost, and what workers repeat is applied again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from springline.center.blocks import Block, Part, RefusedError, make_message, merge_message
from springline.center.errors import CenterError
from springline.center.layout import Bytes, aligned_zeros
from springline.center.plan import Plan, arrays_of, nbytes_of
from springline.center.served.messages import Message, Reply, Row, Sender, cut, span
from springline.center.served.storage import Storage
from springline.rules.rule import Rule

KEPT = 4  # replies that are kept at most
_ERRORS: Mapping[str, Any] = {"over": "raise", "invalid": "raise", "divide": "raise"}
_log = logging.getLogger("springline")


class Shard:
    """One part of a center.

    Args:
        plan: of the whole center, as JSON.
        rule: the workers'.
        number: which part this is.
        count: of how many.
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
        self._runs = cut(self._plan, count)[number]
        self._start, self._stop = span(self._runs)
        self._center = aligned_zeros(self._stop - self._start)
        self._entries = self._plan.state_within(self._start, self._stop)
        self._state = aligned_zeros(nbytes_of(self._entries))
        self._ready = False
        self._rows: dict[int, Row] = {}
        self._kept: dict[int, tuple[tuple[int, int], Reply]] = {}  # by rank; the oldest first
        self._parts: dict[int, tuple[Part, Bytes]] = {}
        self._slots: dict[int, dict[int, Bytes]] = {}  # by round and rank
        self._round = 0
        self._turn = threading.Lock()  # of an exchange, if the center has locks
        self._ranks: dict[int, threading.Lock] = {}
        self._table = threading.Lock()  # of the dictionaries above
        self._exchanges, self._every = every
        self._since = 0  # exchanges since the last checkpoint
        self._due = threading.Event()
        self._saving = threading.Lock()
        self._storage: Storage | None = None
        self._problem = CenterError(
            f"{self.name.capitalize()} of the center was started again and has no checkpoint to go "
            "on from. Start a new run, with a storage (`--storage`)."
        )
        self._stored = storage is not None
        if storage:
            self._open(storage)

    def initialise(self, center: Bytes, state: Bytes, steps: Sequence[int] = ()) -> None:
        """Give a new center its first values; they are in the storage when this returns."""
        if self._stored and self._storage is None:
            raise self._problem
        with self._turn:
            np.copyto(self._center, center)
            np.copyto(self._state, state)
            self._rows = {rank: Row(steps=n) for rank, n in enumerate(steps)}
            self._round = 0
            self._ready = True
        self.save()

    def exchange(self, message: Message) -> Reply:
        """Apply a worker's exchange, once."""
        sender = message.sender
        with self._rank(sender.rank), self._locked():
            repeat = self._repeat(sender)
            if repeat:
                return repeat
            reply = self._apply(message)
            with self._table:
                if self._rule.adopts_message:
                    self._kept[sender.rank] = sender.at, reply
                    while len(self._kept) > KEPT:
                        self._kept.pop(next(iter(self._kept)))
                self._note(sender)
        return reply

    def received(self, rank: int, at: tuple[int, int]) -> None:
        """Forget the reply to an exchange, which its worker has."""
        with self._table:
            if rank in self._kept and self._kept[rank][0] == tuple(at):
                del self._kept[rank]

    def discount(self, rank: int, at: tuple[int, int], exchanges: int) -> None:
        """Do not count a worker's last exchange, some of whose blocks were refused."""
        with self._table:
            row = self._rows.get(rank, Row())
            if (row.incarnation, row.number) == tuple(at):
                self._rows[rank] = replace(row, exchanges=exchanges)

    def contribute(self, message: Message, number: int) -> int:
        """Take a worker's message for a round; return the last round that was reduced."""
        self._check(message.sender)
        with self._table:
            if number > self._round:
                self._slots.setdefault(number, {})[message.sender.rank] = message.data
            return self._round

    def reduce(self, number: int, contributors: Sequence[int], sender: Sender) -> Reply | list[int]:
        """Reduce a round, unless that is done, and return its mean.

        Returns:
            The ranks whose messages are not here, if any: this shard was started again meanwhile.
        """
        with self._turn:
            if self._round < number:
                slots = self._slots.get(number, {})
                missing = [rank for rank in contributors if rank not in slots]
                if missing:
                    return missing
                part, _ = self._part(0)
                with np.errstate(**_ERRORS):
                    for run, rule, center in (b for shard in part.shards for b in shard):
                        views = [part.view(run, slots[rank]) for rank in contributors]
                        rule.merge(center, views, 0.0)
                self._round = number
                with self._table:
                    self._slots = {n: kept for n, kept in self._slots.items() if n > number}
            with self._table:
                self._note(sender)
            return Reply(self.snapshot())

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
        with self._table:
            return dict(self._rows), self._round

    def save(self) -> None:
        """Write a checkpoint now, if there is a storage."""
        if self._storage is None:
            return
        with self._saving:
            with self._turn, self._table:
                center, state = self._center.copy(), self._state.copy()
                rows = {str(rank): row.to_json() for rank, row in self._rows.items()}
                header = {"span": [self._start, self._stop], "round": self._round, "rows": rows}
                self._since = 0
            self._storage.write(self.name, header, {"center": center, "state": state})

    def _repeat(self, sender: Sender) -> Reply | None:
        """Return the answer to an exchange that was applied already."""
        self._check(sender)
        with self._table:
            row = self._rows.get(sender.rank, Row())
            if sender.at > (row.incarnation, row.number):
                return None
            at, reply = self._kept.get(sender.rank, (None, None))
        if reply and at == sender.at:
            return reply
        return Reply(self.snapshot(), forgotten=True)

    def _apply(self, message: Message) -> Reply:
        before = self.snapshot() if self._rule.adopts_message else None
        part, room = self._part(0 if self._plan.use_locking else message.sender.rank)
        refused = None
        with np.errstate(**_ERRORS):
            blocks = (block for shard in part.bind(message.data, room) for block in shard)
            for number, block in enumerate(blocks):
                try:
                    _merge(block, message)
                except RefusedError:
                    refused = number
                    break
        return Reply(self.snapshot() if before is None else before, refused)

    def snapshot(self) -> Any:
        """Return a copy of the center as it is sent to workers."""
        return self._center.copy()

    def _check(self, sender: Sender) -> None:
        self._check_ready()
        with self._table:
            known = self._rows.get(sender.rank, Row()).incarnation
        if sender.incarnation < known:
            raise CenterError(
                f"Rank {sender.rank} has been taken over by another worker meanwhile (this one "
                "was not heard of for too long). Start it again to take part."
            )

    def _check_ready(self) -> None:
        if not self._ready:
            raise self._problem

    def _note(self, sender: Sender) -> None:
        self._rows[sender.rank] = Row(
            *sender.at, sender.steps, sender.exchanges, float(sender.seconds)
        )
        self._since += 1
        if self._since >= self._exchanges:
            self._due.set()

    def _part(self, which: int) -> tuple[Part, Bytes]:
        """Return blocks and scratch; without locks every rank has its own."""
        if which not in self._parts:
            state = arrays_of(self._entries, self._state)
            part = Part(self._plan, self._rule, self._runs, self._center, state)
            self._parts[which] = part, part.room()
        return self._parts[which]

    def _rank(self, rank: int) -> threading.Lock:
        with self._table:
            return self._ranks.setdefault(rank, threading.Lock())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._plan.use_locking:
            with self._turn:
                yield
        else:
            yield

    def _open(self, place: str) -> None:
        """Open the storage; what is wrong with it is said to whoever asks for something."""
        try:
            self._storage = Storage(place)
            self._restore(self._storage)
        except CenterError as error:
            self._storage, self._problem = None, error
        else:
            threading.Thread(target=self._keep, name="checkpoints", daemon=True).start()

    def _restore(self, storage: Storage) -> None:
        saved = storage.read(self.name)
        if saved is None:
            return
        header, tensors = saved
        if header["span"] != [self._start, self._stop]:
            raise CenterError(
                f"The checkpoint of {self.name} in {storage.place} is of another model, or of "
                "another number of shards. Give another storage, or the same shards."
            )
        np.copyto(self._center, tensors["center"])
        np.copyto(self._state, tensors["state"])
        self._rows = {int(rank): Row(*values) for rank, values in header["rows"].items()}
        self._round = header["round"]
        self._ready = True

    def _keep(self) -> None:
        """Write checkpoints for as long as the process lives."""
        while True:
            self._due.wait(self._every)
            self._due.clear()
            if self._ready and self._since:
                try:
                    self.save()
                except CenterError as error:
                    _log.warning("No checkpoint of %s: %s", self.name, error)


def _merge(block: Block, message: Message) -> None:
    entry = block.run.entry
    if block.rule.reads_center:
        sent = make_message(block, message.gradients)
    elif entry is None or message.seen[entry]:
        sent = block.local.message  # a copy that optimizers may write to
        np.copyto(sent, block.local.x)
    else:
        return  # no gradient since the last exchange: nothing to merge
    merge_message(block, sent, 0.0 if entry is None else float(message.rates[entry]))
