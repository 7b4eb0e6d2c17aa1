"""A shard to which workers of its own machine can stream their `x`, through memory that they lend.

A piece at a time is applied and answered, each once, however often it comes. Pieces of several
workers come as they come, and none waits for a worker who has stopped.
"""

from __future__ import annotations

import contextlib

from springline.center.served.messages import Message
from springline.center.served.near import AGAIN, REFUSED, Address, Guest, LeftError
from springline.center.served.shard import Shard


class NearShard(Shard):
    """A shard to which workers of its own machine can stream."""

    def stream(self, message: Message, before: bool, address: Address) -> bool:
        """Apply a worker's exchange, once, as its pieces come.

        Args:
            message: all but its data.
            before: whether the worker wants to know `c` as it was, beside what it adopts.
            address: of the memory through which the data comes.

        Returns:
            Whether the memory can be reached from here.
        """
        self._check(message.sender)
        try:
            guest = Guest(address)
        except OSError:
            return False
        with guest, contextlib.suppress(LeftError), self._book.alone(message.sender):
            self._stream(message, before, guest)
        return True

    def _stream(self, message: Message, before: bool, guest: Guest) -> None:
        sender, count = message.sender, self._merger.pieces
        refused = self._book.refused(sender)
        for piece in range(message.had, count):
            guest.wait(lambda: self._book.check_latest(sender))
            slot = guest.slots[piece % len(guest.slots)]
            with self._locked():
                if self._book.applied(sender) or piece < self._book.pieces(sender):
                    self._merger.show(piece, slot)
                    answer, whole = AGAIN if piece != refused else REFUSED, piece != refused
                else:
                    answer, whole = self._merger.swap(piece, slot, message, before)
                    if whole and piece + 1 < count:
                        self._book.note_pieces(sender, piece + 1)
                    else:
                        self._note(sender, None if whole else piece)
            guest.say(answer)
            if not whole:
                return
