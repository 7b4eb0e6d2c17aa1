"""What workers have sent to a shard for rounds that it has not reduced yet."""

from __future__ import annotations

from collections.abc import Sequence

from springline.center.layout import Bytes, aligned_zeros
from springline.center.served.messages import Message


class Slots:
    """The messages of the open rounds.

    Args:
        reduced: the last round whose mean the shard holds.
    """

    def __init__(self, reduced: int = 0) -> None:
        self.reduced = reduced
        self.latest = reduced  # the last round that was begun to be reduced
        self._messages: dict[int, dict[int, Message]] = {}  # by round and rank
        self._rooms: list[Bytes] = []  # all that were made
        self._free: list[Bytes] = []  # those that hold nothing

    def room(self, nbytes: int) -> Bytes:
        """Return room for a message, to be given back with `take` or `free`."""
        if not self._free:  # memory is new once: to touch it for the first time takes long
            self._rooms.append(aligned_zeros(nbytes))
            self.free(self._rooms[-1])
        return self._free.pop()

    def free(self, room: Bytes) -> None:
        """Give a room back, if it is one of ours."""
        if any(room is one for one in self._rooms):
            self._free.append(room)

    def take(self, message: Message, number: int) -> None:
        """Keep a worker's message for a round, unless a later one of its is here."""
        left: Message | None = message
        if number > self.latest:
            slots = self._messages.setdefault(number, {})
            known = slots.get(message.sender.rank)
            if known is None or known.sender.at <= message.sender.at:
                slots[message.sender.rank], left = message, known
        if left is not None:
            self.free(left.data)

    def begin(self, number: int, contributors: Sequence[int]) -> dict[int, Message] | list[int]:
        """Begin to reduce a round.

        Args:
            number: of the round.
            contributors: who is in it; none if that is not known: who is here.

        Returns:
            Its messages, by rank, and no other is taken any more; or the ranks whose are not here.
        """
        slots = self._messages.get(number, {})
        wanted = list(contributors) or sorted(slots)
        missing = [rank for rank in wanted if rank not in slots]
        if missing:
            return missing
        self.latest = number
        return {rank: slots[rank] for rank in wanted}

    def forget(self, number: int) -> None:
        """Let go of a round that is reduced now, and of those before it."""
        self.reduced = number
        for n in [n for n in self._messages if n <= number]:
            for message in self._messages.pop(n).values():
                self.free(message.data)
