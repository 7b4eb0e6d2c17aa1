"""What workers have sent to a shard for rounds that it has not reduced yet."""

from __future__ import annotations

from collections.abc import Sequence

from springline.center.layout import Bytes
from springline.center.served.messages import Sender


class Slots:
    """The messages of the open rounds.

    Args:
        reduced: the last round whose mean the shard holds.
    """

    def __init__(self, reduced: int = 0) -> None:
        self.reduced = reduced
        self._kept: dict[int, dict[int, tuple[Sender, Bytes]]] = {}  # by round and rank

    def take(self, sender: Sender, data: Bytes, number: int) -> None:
        """Keep what a worker has sent for a round, unless something later of its is here."""
        if number > self.reduced:
            slots = self._kept.setdefault(number, {})
            known = slots.get(sender.rank)
            if known is None or known[0].at <= sender.at:
                slots[sender.rank] = sender, data

    def of_round(
        self, number: int, contributors: Sequence[int], asker: int
    ) -> dict[int, Bytes] | list[int]:
        """Return the messages of a round, by rank; or the ranks whose are not here.

        Args:
            number: of the round.
            contributors: who is in it; none if that is not known: who is here.
            asker: who is in it for certain.
        """
        slots = self._kept.get(number, {})
        wanted = list(contributors) or sorted({*slots, asker})
        missing = [rank for rank in wanted if rank not in slots]
        return missing or {rank: slots[rank][1] for rank in wanted}

    def forget(self, number: int) -> None:
        """Let go of a round that is reduced now, and of those before it."""
        self.reduced = number
        self._kept = {n: kept for n, kept in self._kept.items() if n > number}
