"""A shard with which workers of its own machine exchange through memory.

Without rounds that is memory that the workers lend: a piece at a time is applied and answered, each
once, however often it comes. Pieces of several workers come as they come, and none waits for a
worker who has stopped. For rounds the shard lends: rooms for what is contributed, and the center.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from springline.center import lent
from springline.center.layout import Bytes
from springline.center.lent import Lent
from springline.center.served.messages import Message, Sender
from springline.center.served.near import AGAIN, REFUSED, Address, Guest, LeftError, Request
from springline.center.served.rooms import Offer, size_with_marks, split
from springline.center.served.shard import Shard


class NearShard(Shard):
    """A shard with which workers of its own machine exchange through memory.

    Args:
        arguments: as of any shard.
    """

    def __init__(self, *arguments: Any) -> None:
        self._lent: Lent | None = None  # the center, for rounds
        self._rooms: dict[int, tuple[Sender, Lent]] = {}  # by rank: who asked for it
        self._borrowed: dict[int, tuple[Address, Bytes]] = {}  # by rank: where we were last
        super().__init__(*arguments)

    def stream(self, packed: bytes) -> bool:
        """Apply a worker's exchange, once, as its pieces come; then those that it has next.

        Args:
            packed: the first one's `Request`.

        Returns:
            True when the worker has left, or at once if this call was made before; False at once if
            its memory cannot be reached from here.
        """
        return self._visit(Request.unpack(packed))

    def lend(self, sender: Sender, machine: str) -> Offer | None:
        """Return a new room for what a worker contributes to rounds, and where the mean is.

        Args:
            sender: who asks; the room that it had is not used any more.
            machine: on which it is.

        Returns:
            None if it is elsewhere, if there is no memory, or if it has asked again since.
        """
        self._check(sender)
        if self._lent is None or machine != lent.machine():
            return None
        with self._table:
            asked, room = self._rooms.get(sender.rank, (None, None))
            if asked is None or asked.at < sender.at:
                room = _lend(size_with_marks(len(self._center)))
                if room:
                    self._forget_room(sender)
                    self._rooms[sender.rank] = sender, room
            elif asked.at > sender.at:
                return None
            return Offer(room.address, self._lent.address) if room else None

    def _forget_room(self, sender: Sender) -> None:
        """Forget a worker's room, unless it has asked for it later than this."""
        asked, room = self._rooms.get(sender.rank, (sender, None))
        if room and asked.at <= sender.at:
            del self._rooms[sender.rank]
            data, marks = split(room.memory)
            self._slots.take(asked, data, int(marks[0]))  # its round may still be reduced
            room.close()

    def contribute(self, message: Message, number: int) -> int:
        """Take a worker's message for a round: it has no use for a room."""
        self._check(message.sender)
        with self._table:
            self._forget_room(message.sender)
        return super().contribute(message, number)

    def mean(
        self, number: int, contributors: Sequence[int], sender: Sender
    ) -> tuple[str, int] | list[int]:
        """Reduce a round, unless that is done; the same as `reduce`.

        Returns:
            The token of the memory in which the mean is, and the round it is of; or the ranks whose
            messages are not here.
        """
        self._check(sender)
        with self._turn:
            missing = self._reduce(number, contributors, sender)
            if missing:
                return missing
            token = self._lent.address.token if self._lent else ""
            return token, self._slots.reduced

    def _reduce(self, number: int, contributors: Sequence[int], sender: Sender) -> list[int]:
        with self._table:
            for writer, room in self._rooms.values():
                data, marks = split(room.memory)
                if marks[0] == number:  # that is what it was last written for
                    self._slots.take(writer, data, number)
        return super()._reduce(number, contributors, sender)

    def _mark(self, number: int, pieces: int) -> None:
        if self._lent:
            _, marks = split(self._lent.memory)
            marks[1] = 0  # of which round is not clear for a moment
            marks[0] = number
            marks[1] = pieces

    def _allocate(self, size: int) -> Bytes:
        """Have the center in memory that can be lent, where workers adopt it as it is."""
        if self._rule.synchronous:
            self._lent = _lend(size_with_marks(size))
        return self._lent.memory[:size] if self._lent else super()._allocate(size)

    def _visit(self, request: Request) -> bool:
        """Be in a worker's memory until it leaves; what is returned is as of `stream`."""
        self._check_ready()
        try:
            guest = self._enter(request)
        except OSError:
            return False
        if guest:
            with contextlib.suppress(LeftError), guest:
                while self._stream(request, guest):
                    request = guest.next(partial(self._book.check_latest, request.message.sender))
        return True

    def _enter(self, request: Request) -> Guest | None:
        """Enter a worker's memory, which is kept until there is other; None if we have before.

        Of a call that is made twice, the second would take what the first is to be told.
        """
        sender, address = request.message.sender, request.address
        with self._table:
            self._book.check(sender)  # here: no earlier life is to come in between
            known, memory = self._borrowed.get(sender.rank, (None, None))
            if known == address:
                return None
            if memory is None or known is None or known.memory != address.memory:
                memory = lent.borrow(address.memory, populate=True)
            guest = Guest(address, memory)
            self._borrowed[sender.rank] = address, memory
        return guest

    def _stream(self, request: Request, guest: Guest) -> bool:
        """Apply an exchange; whether as a whole."""
        message, sender = request.message, request.message.sender
        with self._book.alone(sender):
            refused, check = self._book.refused(sender), partial(self._book.check_latest, sender)
            for piece in range(message.had, self._merger.pieces):
                guest.wait(check)
                with self._locked():
                    answer, whole = self._swap(request, piece, refused, guest)
                guest.say(answer)
                if not whole:
                    return False
        return True

    def _swap(
        self, request: Request, piece: int, refused: int | None, guest: Guest
    ) -> tuple[int, bool]:
        """Apply a piece, once; return what is answered, and whether it was not refused."""
        message, sender = request.message, request.message.sender
        slot = guest.slots[piece % len(guest.slots)]
        if self._book.applied(sender) or piece < self._book.pieces(sender):
            shown, whole = self._merger.show(piece, slot), piece != refused
            again = AGAIN if self._rule.adopts_message else shown  # else it is as usual
            return again if whole else REFUSED, whole
        answer, whole = self._merger.swap(piece, slot, message, request.before)
        if whole and piece + 1 < self._merger.pieces:
            self._book.note_pieces(sender, piece + 1)
        else:
            self._note(sender, None if whole else piece)
        return answer, whole


def _lend(size: int) -> Lent | None:
    """Return memory that can be lent, if there is some."""
    with contextlib.suppress(OSError):
        if lent.POSSIBLE:
            found = Lent(size)
            found.reserve(size)
            return found
    return None
