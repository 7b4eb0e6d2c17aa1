"""Synchronous rounds at a served center.

A worker sends its message to every shard and then tells the head. The head closes the round over
those who did, and everybody takes the mean of these from the shards, which make it when they are
first asked. A worker that dies between two shards has told the head nothing: what it sent does not
count. Who was in a round is in the next: it need not ask which that is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from springline.center.errors import CenterError
from springline.center.served.head import BEAT
from springline.center.served.messages import Message, Reply
from springline.center.served.parts import Parts
from springline.center.served.peer import Call
from springline.center.served.rooms import Rooms

_RESENT = 10.0  # seconds that others have to send again what a restarted shard has lost

if TYPE_CHECKING:
    from springline.center.served.member import ServedMember


class Rounds:
    """One member's part in the rounds of its center."""

    def __init__(self, member: ServedMember) -> None:
        self._member = member
        self._next = 0  # round that we are in, if we know
        self._rooms: Rooms | None = None
        self._lost: set[int] = set()  # shards that were, while we contributed

    def forget_rooms(self) -> None:
        """Use no memory again that a round may still read."""
        if self._rooms:
            self._rooms.forget()

    def exchange(self, parts: Parts) -> None:
        """Take part in one round."""
        number, self._next = self._next, 0
        try:
            while not self._next:
                number = number or self._begin()
                message = self._contribute(parts, number)
                contributors = self._close(number)
                if contributors is not None:
                    self._reduce(parts, message, number, contributors)
                    self._next = number + 1
                else:  # it was closed without us meanwhile; then we are in the next
                    self.forget_rooms()
                    number = 0
        finally:
            if not self._next:
                self.forget_rooms()
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

    def _rooms_for(self, parts: Parts) -> Rooms:
        if self._rooms is None:
            self._rooms = Rooms(self._member, parts.sizes)
        return self._rooms

    def _contribute(self, parts: Parts, number: int) -> Message:
        """Send our message to every shard; return it, but for its data."""
        member, rooms = self._member, self._rooms_for(parts)
        head, near = member.message(parts.local), set(rooms.near)
        far = set(range(len(parts.sizes))) - near

        def send(shards: set[int]) -> dict[int, Call]:
            messages = {k: replace(head, data=parts.data(k)) for k in shards}
            return {k: member.ask(k, "contribute", m, number) for k, m in messages.items()}

        calls = send(far)
        rooms.contribute(parts, head, number)
        calls |= send(near - rooms.near)
        for call in calls.values():
            call.result()
        self._lost = {k for k, call in calls.items() if call.was_lost}
        return head

    def _close(self, number: int) -> list[int] | None:
        """Say that we have contributed, and wait until the round is closed.

        Returns:
            Who has; none if it is not known any more. None if it was closed before.
        """
        found: list[list[int] | None] = []

        def contribute(seconds: float) -> list[int]:
            answer = self._member.ask_as_member("contribute", number, seconds)
            closed, ranks = answer or (True, None)
            if closed:
                found.append(ranks)
                return []
            return ranks or [self._member.rank]

        self._member.wait(contribute, f"round {number}")
        return found[0]

    def _reduce(
        self, parts: Parts, message: Message, number: int, contributors: Sequence[int]
    ) -> None:
        """Take a round's mean from every shard."""
        member, rooms = self._member, self._rooms_for(parts)
        asked = number, contributors, message.sender
        calls = {
            k: member.ask(k, "mean" if k in rooms.near else "reduce", *asked)
            for k in range(len(parts.sizes))
        }
        alone = contributors == [member.rank]  # the mean of one is what it has sent
        near = {k: call for k, call in calls.items() if k in rooms.near and not alone}
        adopted = rooms.follow(parts, near, number)
        for k, call in calls.items():
            answer = call.result()
            if isinstance(answer, tuple):
                _, last = answer
                if alone and last == number:
                    continue
                if rooms.adopt(parts, k, adopted.get(k, 0) if last == number else 0, *answer):
                    continue
                answer = member.ask(k, "reduce", *asked).result()
            if isinstance(answer, list):
                sent = rooms.contributed(k) if k in rooms.near else parts.data(k)
                again = replace(message, data=sent)
                answer = self._reduce_again(k, again, number, contributors)
            parts.adopt_mean(k, answer.data)
            if k in rooms.near or k in self._lost or call.was_lost:
                rooms.look_again(k)

    def _reduce_again(self, k: int, message: Message, number: int, asked: Sequence[int]) -> Reply:
        """Take the mean from a shard that was started again: what it had been sent is gone.

        We send our message again, and so do those who wait as we do. The others have gone on with
        the mean that it gave them, and are left out of this one.
        """
        waited = time.monotonic()
        while True:
            self._member.ask(k, "contribute", message, number).result()
            ask = self._member.ask(k, "reduce", number, asked, message.sender)
            answer: Reply | list[int] = ask.result()
            if not isinstance(answer, list):
                return answer
            if time.monotonic() - waited > _RESENT:
                asked = [rank for rank in asked if rank not in answer or rank == self._member.rank]
            time.sleep(BEAT)
