"""One worker's place at a served center: what it sends, and what it makes of the replies."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from springline.center.blocks import Block, Part, RefusedError, make_message, non_finite
from springline.center.center import Local, Member
from springline.center.errors import (
    CenterError,
    EndedError,
    NonFiniteError,
    RankError,
    TakenOverError,
)
from springline.center.layout import Bytes
from springline.center.served.head import BEAT
from springline.center.served.messages import Message, Reply, Row, Sender, span
from springline.center.served.near import AGAIN, Piece
from springline.center.served.peer import Call, PeerLostError
from springline.center.served.rounds import Rounds
from springline.center.served.seats import NotAMemberError
from springline.center.served.stream import Streams
from springline.center.waiting import wait_until
from springline.rules.rule import CenterBlock, Rule

if TYPE_CHECKING:
    from springline.center.served.center import ServedCenter

_POLL = 5.0  # seconds that the head is asked to wait for others in one call
_RESTART = 30.0  # seconds beyond the timeout in which a head or shard may be started again
_log = logging.getLogger("springline")


class ServedMember(Member):
    """One worker's place at a served center."""

    def __init__(
        self, center: ServedCenter, rank: int, rule: Rule, timeout: float | None = None
    ) -> None:
        self.rank = rank
        self.rule = rule
        self.timeout = timeout
        self.center = center
        self.left = False
        self._problem: CenterError | None = None  # why we are no member any more
        self._incarnation, row, _ = self.ask_head("join", rank, None)
        self.start_step = row.steps
        self._row = Row(self._incarnation, 0, row.steps, row.exchanges, row.seconds)
        self._turn = threading.RLock()
        self._busy = False
        self._bound: Local | None = None
        self.parts: list[Part] = []
        self.blocks: list[list[Block]] = []  # of each shard
        self._streams = Streams(rule, ())
        self._rounds = Rounds(self) if rule.synchronous else None
        self._outgoing: Bytes | None = None  # for messages that are not `x` itself
        self._gone = threading.Event()
        threading.Thread(target=self._beat, name="springline beat", daemon=True).start()
        try:
            self.ask_head("joined", rank, self._incarnation)
        except BaseException:
            self._gone.set()  # nobody has this seat
            raise

    def exchange(self, local: Local) -> None:
        """Exchange with all shards at once; two threads of a worker take turns."""
        with self._turn:
            self.check_here()
            if self._busy:
                raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
            start = time.perf_counter()
            if local is not self._bound:
                self._bind(local)
            self._busy = True
            try:
                with np.errstate(over="raise", invalid="raise", divide="raise"):
                    if self._rounds:
                        self._rounds.exchange(local)
                    else:
                        self._swap(local)
            finally:
                self._busy = False
                local.forget_gradients()
            self._row = replace(
                self._row,
                steps=local.steps,
                exchanges=self._row.exchanges + 1,
                seconds=self._row.seconds + time.perf_counter() - start,
            )

    def barrier(self) -> None:
        """Wait until all ranks have joined and are there at once, or have been before."""
        self.wait(lambda seconds: self.ask_head("barrier", seconds), "all workers to start")

    def leave(self) -> None:
        """Give the rank back, once."""
        if self.left or os.getpid() != self.center.process:
            return
        self.left = True
        self._gone.set()
        with self._turn:
            self.center.forget(self)
            if not self._busy:
                self._streams.close()
            with contextlib.suppress(CenterError):  # nobody there: it is as good as left
                head = self.center.head
                Call(head, "leave", self.rank, self._incarnation, timeout=5.0).result()

    def check_here(self) -> None:
        """Refuse to exchange when no longer a member."""
        if self.left:
            raise CenterError(f"Rank {self.rank} has left the center; join again to exchange.")
        if self._problem:
            raise self._problem
        self.center.check_process()

    # Asynchronous rules.

    def _swap(self, local: Local) -> None:
        messages = dict(enumerate(self.messages(local)))
        at = messages[0].sender.at
        peers, near = self.center.shards, self._streams.near
        calls = {k: self.ask(k, "exchange", messages[k]) for k in messages if k not in near}
        refused, others = self._streams.exchange(
            {k: (peers[k], messages[k]) for k in near},
            partial(self._adopt_piece, local),
            self._patience,
        )
        calls |= {k: self.ask(k, "exchange", messages[k]) for k in others}
        for k, call in calls.items():
            reply: Reply = call.result()
            refused = self._adopt(k, reply, local) or refused
            if self.rule.adopts_message or reply.refused is not None:
                peers[k].tell("received", self.rank, at)
            if call.was_lost:
                self._streams.look_again(k)
        if refused:
            for k in messages:
                self.ask(k, "discount", self.rank, at, self._row.exchanges).result()
            raise refused

    def messages(self, local: Local) -> list[Message]:
        """Return what is sent to each shard: `x` itself where the shard makes the message."""
        x = local.x
        if not self.rule.reads_center and not self.rule.synchronous:
            x = self._make_messages(local)
        elif self.rule.synchronous:
            self._check_finite(local)
        row = self._row = replace(self._row, number=self._row.number + 1)
        life = self.rank, self._incarnation, row.number
        sender = Sender(*life, local.steps, row.exchanges + 1, row.seconds)
        seen, rates = local.seen.copy(), local.rates.copy()
        return [
            Message(sender, x[start:stop], local.gradients, seen, rates)
            for start, stop in map(span, self.center.parts)
        ]

    def _make_messages(self, local: Local) -> Bytes:
        if self._outgoing is None:
            self._outgoing = self.center.layout.allocate()
        for k, part in enumerate(self.parts):
            start, stop = span(self.center.parts[k])
            for block in self.blocks[k]:
                entry = block.run.entry
                out = part.view(block.run, self._outgoing[start:stop])
                if block.rule.reads_center:
                    np.copyto(out, block.local.x)
                elif entry is None or local.seen[entry]:
                    np.copyto(out, self._message(block, local))
        return self._outgoing

    def _check_finite(self, local: Local) -> None:
        for blocks in self.blocks:
            for block in blocks:
                self._message(block, local)

    def _message(self, block: Block, local: Local) -> Any:
        try:
            return make_message(block, local.gradients)
        except RefusedError as error:
            raise non_finite(self.center.layout, block.run, error.values, self.rank) from error

    def _adopt(self, k: int, reply: Reply, local: Local) -> NonFiniteError | None:
        """Adopt a shard's reply; return the error if a block of ours was refused there."""
        if reply.forgotten:
            start, stop = span(self.center.parts[k])
            local.x[start:stop] = reply.data
            if local.copy is not None:
                local.copy[start:stop] = reply.data
            self._say_forgotten(k)
            return None
        for number, block in enumerate(self.blocks[k]):
            c = self.parts[k].view(block.run, reply.data)
            if number == reply.refused:
                return self._refused(block, c, local)
            self._adopt_block(block, c, local)
        return None

    def _adopt_piece(
        self, local: Local, k: int, piece: Piece, slot: Bytes, answer: int
    ) -> NonFiniteError | None:
        """Adopt a piece of a shard's reply; the same."""
        pairs = zip(self.blocks[k][piece.blocks], piece.elements(slot), strict=True)
        for number, (block, c) in enumerate(pairs):
            if answer == AGAIN:
                np.copyto(block.local.x, c)
                if block.local.copy is not None:
                    np.copyto(block.local.copy, c)
            elif number == answer:
                return self._refused(block, c, local)
            elif self.rule.keeps_copy:
                self._adopt_block(block, c, local)
            else:
                block.rule.adopt(block.local, c, c)  # what it adopts: its message, or the center
        if answer == AGAIN:
            self._say_forgotten(k)
        return None

    def _adopt_block(self, block: Block, c: Any, local: Local) -> None:
        message = block.local.x
        if self.rule.adopts_message:  # `c` is the center as it was before
            message = block.rule.contribute(block.local, c, local.gradients)
            if not block.rule.adopts_message:
                after = CenterBlock(c.copy(), np.empty_like(c))
                block.rule.merge(after, (message,), 0.0)
                c = after.c
        block.rule.adopt(block.local, message, c)

    def _say_forgotten(self, k: int) -> None:
        if self.rule.adopts_message:  # for the others it is the usual answer
            _log.warning(
                "%s had this exchange already, but its answer is lost: going on from the center.",
                self.center.shards[k].name,
            )

    def _refused(self, block: Block, c: Any, local: Local) -> NonFiniteError:
        where = self._where(block, c, local)
        return non_finite(self.center.layout, block.run, where, self.rank)

    def _where(self, block: Block, c: Any, local: Local) -> Any:
        """Return what was not finite in a block that a shard refused."""
        if block.rule.reads_center:
            with np.errstate(all="ignore"):
                return block.rule.contribute(block.local, c, local.gradients)
        return block.local.x

    # The head.

    @property
    def _patience(self) -> float | None:
        return None if self.timeout is None else self.timeout + _RESTART

    def ask(self, shard: int, method: str, *arguments: Any) -> Call:
        """Begin to call a shard."""
        return Call(self.center.shards[shard], method, *arguments, timeout=self._patience)

    def ask_head(self, method: str, *arguments: Any) -> Any:
        """Call the head."""
        return Call(self.center.head, method, *arguments, timeout=self._patience).result()

    def ask_as_member(self, method: str, *arguments: Any) -> Any:
        """Call the head as a member; join anew if it has forgotten us."""
        self.check_here()
        try:
            return self.ask_head(method, self.rank, self._incarnation, *arguments)
        except NotAMemberError:
            self._join_anew(self._patience)
            return self.ask_head(method, self.rank, self._incarnation, *arguments)

    def _join_anew(self, patience: float | None) -> None:
        for method in ("join", "joined"):
            call = Call(self.center.head, method, self.rank, self._incarnation, timeout=patience)
            call.result()

    def wait(self, ask: Callable[[float], list[int]], what: str) -> None:
        """Wait until `ask`, which waits a while itself, names nobody any more."""
        missing: list[int] = []

        def done() -> bool:
            missing[:] = ask(_POLL if self.timeout is None else min(self.timeout, _POLL))
            return not missing

        wait_until(done, lambda: missing, self.timeout, what)

    def _beat(self) -> None:
        """Say that we are alive, until we leave."""
        while not self._gone.wait(BEAT):
            try:
                pending = self.center.head.ask("beat", self.rank, self._incarnation, self._row)
                if not pending.result(BEAT) and not self.left:
                    self._join_anew(patience=None)  # nobody waits for this thread
                    if self._gone.is_set():  # meanwhile
                        self.center.head.tell("leave", self.rank, self._incarnation)
            except (TimeoutError, PeerLostError):
                continue  # the next one will do
            except (TakenOverError, RankError, EndedError) as error:
                self._problem = error
                return
            except Exception as error:  # whatever it is, the next one may do
                _log.warning("Rank %d could not say that it is alive: %s", self.rank, error)

    def _bind(self, local: Local) -> None:
        """Lay the worker's buffers out as the blocks of each shard."""
        self.parts, self.blocks = [], []
        for runs in self.center.parts:
            here = slice(*span(runs))
            a, copy = (None if b is None else b[here] for b in (local.a, local.copy))
            # `x` stands in for the center, which no message reads that is made here.
            part = Part(self.center.plan, self.rule, runs, local.x[here], {})
            shards = part.bind(local.x[here], part.room(), a, copy)
            self.parts.append(part)
            self.blocks.append([block for shard in shards for block in shard])
        self._streams.close()
        self._streams = Streams(self.rule, [[b.run for b in blocks] for blocks in self.blocks])
        self._bound = local
