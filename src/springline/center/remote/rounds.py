"""Synchronous rounds at a remote center.

A worker sends its message to every shard and then reports to the head. The head closes the round
over those that did, and all of them take the mean from the shards, which make it on the first call.
A worker that dies between two shards has reported nothing: what it sent does not count. What a
worker has reported counts, also if it dies before the round is closed. A member of one round is in
the next: it need not ask which that is.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from springline.center.remote.head import HEARTBEAT
from springline.center.remote.messages import ClosedRound, Message, Reply
from springline.center.remote.peer import Call
from springline.center.remote.worker_blocks import WorkerBlocks
from springline.errors import CenterError

_RESENT = 10.0  # seconds that others have to resend what a restarted shard has lost

if TYPE_CHECKING:
    from springline.center.remote.member import RemoteMember


class RemoteRounds:
    """One member's part in the rounds of its center."""

    def __init__(self, member: RemoteMember) -> None:
        self._member = member
        self._strict = member.rule.belongs_to_a_round
        self._next = 0  # round that we are in, if we know

    @property
    def number(self) -> int:
        """The number of the next round, from 0 on, if we know."""
        return self._member.center.base + max(self._next, 1) - 1

    def begin_here(self) -> None:
        """Let the worker's buffers belong to the round that we may contribute to next."""
        if self._strict:
            self._next = self._begin()

    def exchange(self, blocks: WorkerBlocks) -> bool:
        """Take part in one round; False if the worker's buffers belong to an earlier one."""
        number, self._next = self._next, 0
        try:
            while True:
                if not number:
                    if self._strict:
                        return False
                    number = self._begin()
                messages = self._contribute(blocks, number)
                closed = self._close(number, blocks.local.steps)
                if closed:
                    self._reduce(blocks, messages, closed)
                    self._next = number + 1
                    return True
                number = 0  # it was closed without us meanwhile; then we are in the next
        finally:
            if number and not self._next and not self._member.left:
                with contextlib.suppress(CenterError):
                    self._member.ask_as_member("withdraw", number)

    def _begin(self) -> int:
        """Return the round to contribute to, after waiting for the one we have no part in."""
        found: list[int] = []

        def begin(seconds: float) -> list[int]:
            answer = self._member.ask_as_member("begin", seconds)
            if isinstance(answer, int):
                found.append(answer)
                return []
            return list(answer)

        self._member.wait(begin, "the round that is under way")
        return found[0]

    def _contribute(self, blocks: WorkerBlocks, number: int) -> list[Message]:
        """Send our messages to the shards; return them."""
        messages = self._member.messages(blocks)
        calls = [self._member.ask(k, "contribute", m, number) for k, m in enumerate(messages)]
        for call in calls:
            call.result()
        return messages

    def _close(self, number: int, steps: int) -> ClosedRound | None:
        """Report our contribution, and wait until the round is closed.

        Returns:
            The closed round; None if it was closed before.
        """
        found: list[ClosedRound | None] = []

        def contribute(seconds: float) -> list[int]:
            answer = self._member.ask_as_member("contribute", number, seconds, steps)
            if isinstance(answer, list):
                return answer or [self._member.rank]
            found.append(answer)
            return []

        self._member.wait(contribute, f"round {number}")
        return found[0]

    def _reduce(self, blocks: WorkerBlocks, messages: list[Message], closed: ClosedRound) -> None:
        """Take a round's mean from every shard."""

        def reply(k: int, call: Call) -> Reply:
            answer: Reply | list[int] = call.result()
            if isinstance(answer, list):
                answer = self._reduce_again(k, messages[k], closed)
            return answer

        asked = closed, messages[0].sender
        calls = [self._member.ask(k, "reduce", *asked) for k in range(len(messages))]
        refused = blocks.adopt([partial(reply, k, call) for k, call in enumerate(calls)])
        if refused:
            raise refused

    def _reduce_again(self, k: int, message: Message, closed: ClosedRound) -> Reply:
        """Take the mean from a shard that restarted: what it had been sent is gone.

        We send our message again, and so do the others that wait. The others have gone on with
        the mean that it gave them, and are left out of this one.
        """
        waited, without = time.monotonic(), list[int]()
        while True:
            self._member.ask(k, "contribute", message, closed.number).result()
            ask = self._member.ask(k, "reduce", closed, message.sender, without)
            answer: Reply | list[int] = ask.result()
            if not isinstance(answer, list):
                return answer
            if time.monotonic() - waited > _RESENT:
                without += [rank for rank in answer if rank != self._member.rank]
            time.sleep(HEARTBEAT)
