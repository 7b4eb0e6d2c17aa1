"""A shard with which workers of its own machine exchange through memory that they lend.

A piece at a time is applied and answered, each once, however often it comes. Pieces of several
workers come as they come, and none waits for a worker who has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from springline.center.served.messages import Message, Sender
from springline.center.served.near import AGAIN, REFUSED, Address, Guest, LeftError
from springline.center.served.shard import Shard


class NearShard(Shard):
    """A shard with which workers of its own machine exchange through memory."""

    def stream(self, message: Message, before: bool, address: Address) -> bool:
        """Apply a worker's exchange, once, as its pieces come.

        Args:
            message: all but its data.
            before: whether the worker wants to know `c` as it was, beside what it adopts.
            address: of the memory through which the data comes.

        Returns:
            Whether the memory can be reached from here.
        """
        return self._visit(message.sender, address, partial(self._stream, message, before))

    def take(self, message: Message, number: int, address: Address) -> bool:
        """Take a worker's message for a round as its pieces come; the same as `contribute`.

        Returns:
            Whether the memory can be reached from here.
        """
        return self._visit(message.sender, address, partial(self._take, message, number))

    def give(
        self, number: int, contributors: Sequence[int], sender: Sender, had: int, address: Address
    ) -> bool:
        """Reduce a round, as far as that is not done, and give its mean; the same as `reduce`.

        Args:
            number: of the round.
            contributors: whose messages it is the mean of.
            sender: who asks.
            had: how many pieces it has.
            address: of the memory into which the mean goes, whenever a slot is free.

        Returns:
            Whether that is possible: the memory can be reached from here, all messages are here,
            and it is still the last round.
        """
        give = partial(self._give, number, contributors, sender, had)
        return self._visit(sender, address, give)

    def _visit(self, sender: Sender, address: Address, do: Callable[[Guest], bool]) -> bool:
        """Do something in a worker's memory, until it leaves; False if that is not possible."""
        self._check(sender)
        try:
            guest = Guest(address)
        except OSError:
            return False
        try:
            with guest, self._book.alone(sender):
                return do(guest)
        except LeftError:
            return True

    def _take(self, message: Message, number: int, guest: Guest) -> bool:
        with self._table:
            room = self._slots.room(len(self._center))
        kept, last = False, self._merger.pieces - 1
        try:
            for piece in range(last + 1):
                guest.wait(lambda: self._book.check_latest(message.sender))
                self._merger.keep(piece, guest.slots[piece % len(guest.slots)], room)
                if piece == last:  # it counts before the worker knows that it does
                    with self._table:
                        kept = True
                        self._slots.take(replace(message, data=room), number)
                guest.say(0)
        finally:
            if not kept:
                with self._table:
                    self._slots.free(room)
        return True

    def _give(
        self, number: int, contributors: Sequence[int], sender: Sender, had: int, guest: Guest
    ) -> bool:
        for piece in range(had, self._merger.pieces):
            guest.wait(lambda: self._book.check_latest(sender))
            with self._turn:
                if self._slots.latest > number or self._merge(number, contributors, piece + 1):
                    return False
                shown = self._merger.show(piece, guest.slots[piece % len(guest.slots)])
                if piece + 1 == self._merger.pieces:
                    self._note(sender)
            guest.say(shown)
        return True

    def _stream(self, message: Message, before: bool, guest: Guest) -> bool:
        sender, count = message.sender, self._merger.pieces
        refused = self._book.refused(sender)
        for piece in range(message.had, count):
            guest.wait(lambda: self._book.check_latest(sender))
            slot = guest.slots[piece % len(guest.slots)]
            with self._locked():
                if self._book.applied(sender) or piece < self._book.pieces(sender):
                    shown, whole = self._merger.show(piece, slot), piece != refused
                    again = AGAIN if self._rule.adopts_message else shown  # else it is as usual
                    answer = again if whole else REFUSED
                else:
                    answer, whole = self._merger.swap(piece, slot, message, before)
                    if whole and piece + 1 < count:
                        self._book.note_pieces(sender, piece + 1)
                    else:
                        self._note(sender, None if whole else piece)
            guest.say(answer)
            if not whole:
                break
        return True
