"""Replies that a shard keeps, for workers who ask again."""

from __future__ import annotations

import threading

from springline.center.served.messages import Reply, Sender

KEPT = 4  # replies that are kept at most


class Replies:
    """The last replies to a few workers, each until its worker has it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, int], Reply]] = {}  # by rank; the oldest first
        self._table = threading.Lock()

    def keep(self, sender: Sender, reply: Reply) -> None:
        """Keep the reply to an exchange, and forget the oldest if there are too many."""
        with self._table:
            self._kept.pop(sender.rank, None)  # the new one is the latest
            self._kept[sender.rank] = sender.at, reply
            while len(self._kept) > KEPT:
                self._kept.pop(next(iter(self._kept)))

    def to(self, sender: Sender) -> Reply | None:
        """Return the reply to an exchange, if it is kept."""
        with self._table:
            at, reply = self._kept.get(sender.rank, (None, None))
            return reply if at == sender.at else None

    def forget(self, rank: int, at: tuple[int, int]) -> None:
        """Forget the reply to an exchange, which its worker has."""
        with self._table:
            if rank in self._kept and self._kept[rank][0] == tuple(at):
                del self._kept[rank]
