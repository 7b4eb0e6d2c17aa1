"""A member of a remote center: its calls to the head and the shards."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from springline.center.center import Member, check_finite
from springline.center.layout import Bytes
from springline.center.local import Local
from springline.center.remote.head import HEARTBEAT
from springline.center.remote.membership import NotAMemberError
from springline.center.remote.messages import Message, RankProgress, Sender, span
from springline.center.remote.peer import Call, PeerLostError
from springline.center.remote.rounds import RemoteRounds
from springline.center.remote.worker_blocks import WorkerBlocks
from springline.center.verbs import ERRORS
from springline.center.waiting import wait_until
from springline.errors import (
    CenterError,
    EndedError,
    RankError,
    TakenOverError,
)
from springline.rules.rule import Rule

if TYPE_CHECKING:
    from springline.center.remote.center import RemoteCenter

_POLL = 5.0  # seconds that the head is asked to wait for others in one call
_PAUSE = 0.1  # seconds between two polls for the first values
_RESTART = 30.0  # seconds beyond the timeout in which a head or shard may restart
_log = logging.getLogger("springline")


class RemoteMember(Member):
    """A member of a remote center."""

    def __init__(
        self, center: RemoteCenter, rank: int, rule: Rule, timeout: float | None = None
    ) -> None:
        self.rank = rank
        self.rule = rule
        self.timeout = timeout
        self.center = center
        self.left = False
        self._leaver = 0  # the thread that has left
        self._problem: CenterError | None = None  # why we are no member any more
        self.was_sealed = bool(self.ask_head("sealed"))
        self._incarnation, row = self.ask_head("join", rank, None)
        self.start_step = row.steps
        self._row = RankProgress(self._incarnation, 0, row.steps, row.exchanges, row.seconds)
        self._others = sum(p.exchanges for r, p in enumerate(center.progress()) if r != rank)
        self._turn = threading.RLock()
        self._busy = False
        self._blocks: dict[int, WorkerBlocks] = {}  # by fragment, of the buffers exchanged last
        self._rounds = RemoteRounds(self) if rule.rounds else None
        self._fastest = 0.0  # steps per second of the fastest live worker
        self._gone = threading.Event()
        send, name = self._send_heartbeats, "springline heartbeat"
        self._heartbeats = threading.Thread(target=send, name=name, daemon=True)
        self._heartbeats.start()
        try:
            self.ask_head("joined", rank, self._incarnation)
        except BaseException:
            self._gone.set()  # this rank is free
            raise

    @property
    def number(self) -> int:
        """The number of this worker's next exchange."""
        return self._rounds.number if self._rounds else self._row.exchanges

    def fastest(self) -> float:
        """Return the steps per second of the fastest live worker, as of the last heartbeat."""
        return self._fastest

    def exchange(self, local: Local) -> bool:
        """Exchange with all shards at once; two threads of a worker take turns."""
        with self._turn:
            self.check_here()
            if self._busy:
                raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
            start = time.perf_counter()
            blocks = self._blocks_of(local)
            self._busy = True
            try:
                with np.errstate(**ERRORS):
                    if self._rounds:
                        exchanged = self._rounds.exchange(blocks)
                    else:
                        self._swap(blocks)
                        exchanged = True
            finally:
                self._busy = False
                local.forget_gradients(blocks.fragment)
            self._row = replace(
                self._row,
                steps=local.steps,
                exchanges=self._row.exchanges + exchanged,
                seconds=self._row.seconds + time.perf_counter() - start,
                speed=local.speed,
            )
            return exchanged

    def _blocks_of(self, local: Local) -> WorkerBlocks:
        """Return the blocks of the fragment that is exchanged next."""
        fragment = self.number % self.center.layout.fragments
        found = self._blocks.get(fragment)
        if found is None or found.local is not local:
            where = self.center.plan, self.center.parts, fragment
            found = self._blocks[fragment] = WorkerBlocks(*where, self.rule, self.rank, local)
        return found

    def take(self, out: Bytes) -> None:
        """Copy what a worker goes on from, consistent per shard."""
        if self._rounds:
            self._rounds.begin_here()
        self.center.collect("published", out)

    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Give a new center this worker's values: to all shards, under a lease of the head's."""
        if self.was_sealed:
            return int(self.ask_head("sealed"))
        if changed:
            check_finite(self.center.layout, self.center.layout.views(x))
        lease = 0
        answer: tuple[str, int] = "wait", self.rank

        def answered() -> bool:
            nonlocal answer
            answer = self.ask_as_member("seal", mark, changed, lease)
            if answer[0] == "wait":
                time.sleep(_PAUSE)
            return answer[0] != "wait"

        while True:
            wait_until(answered, lambda: [answer[1]], self.timeout, "the center's first values")
            if answer[0] != "send":
                return None if answer[0] == "done" else answer[1]
            lease = answer[1]
            parts = [x[slice(*span(ranges))] for ranges in self.center.parts]
            calls = [self.ask(k, "seal", lease, part) for k, part in enumerate(parts)]
            results = [call.result() for call in calls]
            lease = lease if all(results) else 0  # else a later lease has fenced us off

    def barrier(self) -> None:
        """Wait until all ranks have joined and are there at once, or have been before."""
        self.wait(lambda seconds: self.ask_head("barrier", seconds), "all workers to start")

    def leave(self, finished: bool = False) -> None:
        """Give the rank back, once."""
        if self.left or os.getpid() != self.center.process:
            return
        self.left, self._leaver = True, threading.get_ident()
        self._gone.set()
        with self._turn:
            self.center.forget(self)
            with contextlib.suppress(CenterError):  # no head: it is as good as left
                head = self.center.head
                mine = self.rank, self._incarnation, finished
                Call(head, "leave", *mine, timeout=5.0).result()
        if threading.current_thread() is not self._heartbeats:
            self._heartbeats.join(2 * HEARTBEAT)  # no call may be open when Ray is shut down

    def confirm_finished(self) -> None:
        """Report it to a head that may have restarted meanwhile."""
        self.center.head.tell("finish", self.rank, self._incarnation)

    def check_here(self) -> None:
        """Refuse to exchange when no longer a member."""
        if self.left:
            raise self._has_left()
        if self._problem:
            raise self._problem
        self.center.check_process()

    def _check_stays(self) -> None:
        """Give up what is under way in the background when the worker has left.

        What the same thread is at, which a signal's handler has interrupted, comes to its end.
        """
        if self.left and threading.get_ident() != self._leaver:
            raise self._has_left()

    def _has_left(self) -> CenterError:
        return CenterError(f"Rank {self.rank} has left the center; join again to exchange.")

    def _swap(self, blocks: WorkerBlocks) -> None:
        """Exchange under an asynchronous rule: a call to each shard, and its reply."""
        messages = self.messages(blocks)
        calls = [self.ask(k, "exchange", message) for k, message in enumerate(messages)]
        refused = blocks.adopt([call.result for call in calls])
        if refused:
            sender = messages[0].sender.counted_as(self._row)
            for k in range(len(calls)):
                self.ask(k, "discount", sender).result()
            raise refused

    def messages(self, blocks: WorkerBlocks) -> list[Message]:
        """Return what is sent to each shard.

        Raises:
            NonFiniteError: it is not finite, and none of it is sent.
        """
        local = blocks.local
        data = [blocks.data(k) for k in range(len(self.center.shards))]
        row = self._row = replace(self._row, number=self._row.number + 1)
        with_this = replace(row, steps=local.steps, exchanges=row.exchanges + 1)
        sender = Sender(self.rank, with_this, self._others)
        own = local.seen.copy(), local.rates.copy()
        return [Message(sender, blocks.fragment, part, *own) for part in data]

    # The head.

    @property
    def _patience(self) -> float | None:
        return None if self.timeout is None else self.timeout + _RESTART

    def ask(self, shard: int, method: str, *arguments: Any) -> Call:
        """Begin to call a shard."""
        peer, check = self.center.shards[shard], self._check_stays
        return Call(peer, method, *arguments, timeout=self._patience, check=check)

    def ask_head(self, method: str, *arguments: Any) -> Any:
        """Call the head."""
        peer, check = self.center.head, self._check_stays
        return Call(peer, method, *arguments, timeout=self._patience, check=check).result()

    def ask_as_member(self, method: str, *arguments: Any) -> Any:
        """Call the head as a member; rejoin if it has forgotten us."""
        self.check_here()
        try:
            return self.ask_head(method, self.rank, self._incarnation, *arguments)
        except NotAMemberError:
            self._rejoin(self._patience)
            return self.ask_head(method, self.rank, self._incarnation, *arguments)

    def _rejoin(self, patience: float | None) -> None:
        for method in ("join", "joined"):
            call = Call(self.center.head, method, self.rank, self._incarnation, timeout=patience)
            call.result()

    def wait(self, ask: Callable[[float], list[int]], what: str) -> None:
        """Wait until `ask`, which waits a while itself, names no rank any more."""
        missing: list[int] = []

        def done() -> bool:
            missing[:] = ask(_POLL if self.timeout is None else min(self.timeout, _POLL))
            return not missing

        wait_until(done, lambda: missing, self.timeout, what)

    def _send_heartbeats(self) -> None:
        """Send heartbeats until we leave."""
        while not self._gone.wait(HEARTBEAT):
            try:
                pending = self.center.head.ask("heartbeat", self.rank, self._incarnation, self._row)
                fastest = pending.result(HEARTBEAT)
                self._fastest = fastest or 0.0
                if fastest is None and not self.left:
                    self._rejoin(patience=None)  # nothing waits for this thread
                    if self._gone.is_set():  # meanwhile
                        self.center.head.tell("leave", self.rank, self._incarnation)
            except (TimeoutError, PeerLostError):
                continue  # the next one will do
            except (TakenOverError, RankError, EndedError) as error:
                self._problem = error
                return
            except Exception as error:  # whatever it is, the next one may do
                _log.warning("A heartbeat of rank %d failed: %s", self.rank, error)
