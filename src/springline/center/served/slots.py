"""What workers have sent to a shard for rounds that it has not reduced yet."""

from __future__ import annotations

from collections.abc import Sequence

from springline.center.served.messages import Message


class Slots:
    """The messages of the open rounds.

    Args:
        reduced: the last round whose mean the shard holds.
    """

    def __init__(self, reduced: int = 0) -> None:
        self.reduced = reduced
        self._messages: dict[int, dict[int, Message]] = {}  # by round and rank

    def take(self, message: Message, number: int) -> None:
        """Keep a worker's message for a round, unless a later one of its is here."""
        if number > self.reduced:
            slots = self._messages.setdefault(number, {})
            known = slots.get(message.sender.rank)
            if known is None or known.sender.at <= message.sender.at:
                slots[message.sender.rank] = message

    def of_round(self, number: int, contributors: Sequence[int]) -> dict[int, Message] | list[int]:
        """Return the messages of a round, by rank; or the ranks whose are not here.

        Args:
            number: of the round.
            contributors: who is in it; none if that is not known: who is here.
        """
        slots = self._messages.get(number, {})
        wanted = list(contributors) or sorted(slots)
        missing = [rank for rank in wanted if rank not in slots]
        return missing or {rank: slots[rank] for rank in wanted}

    def forget(self, number: int) -> None:
        """Let go of a round that is reduced now, and of those before it."""
        self.reduced = number
        self._messages = {n: kept for n, kept in self._messages.items() if n > number}
