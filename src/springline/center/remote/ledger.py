"""The ledger of a shard: each rank's applied exchanges, its last reply, its part in open rounds."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from springline.center.remote.messages import Message, RankProgress, Reply, Sender
from springline.errors import taken_over

_KEPT = 4, 1 << 28  # replies that are kept: so many, or more in so many bytes


class Ledger:
    """The ledger of applied exchanges: a row per rank.

    Attributes:
        restarted: whether it is what a checkpoint had.
        lost: exchanges that ranks had made before the shard was restarted and that were not.
    """

    def __init__(self, rows: Mapping[int, RankProgress] = MappingProxyType({})) -> None:
        self._rows = dict(rows)
        done = sum(row.exchanges for row in rows.values())
        # Exchanges of others at a worker's last, by its rank and incarnation.
        self._others = {(r, row.incarnation): done - row.exchanges for r, row in rows.items()}
        self.restarted = False
        self._heard: set[int] = set()  # ranks that have exchanged since the restart
        self.lost = 0
        self._table = threading.Lock()  # of the rows

    @classmethod
    def from_json(cls, rows: Mapping[str, Any]) -> Ledger:
        """Read what `to_json` wrote."""
        ledger = cls({int(rank): RankProgress(*row) for rank, row in rows.items()})
        ledger.restarted = True
        return ledger

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {str(rank): row.to_json() for rank, row in self.rows().items()}

    def rows(self) -> dict[int, RankProgress]:
        """Return how far each rank has come."""
        with self._table:
            return dict(self._rows)

    def check(self, sender: Sender) -> None:
        """Refuse a rank's earlier incarnations: its latest fences them off from its first call on.

        Raises:
            TakenOverError: a later incarnation of the rank has been here.
        """
        with self._table:
            row, incarnation = self._row(sender), sender.row.incarnation
            if incarnation < row.incarnation:
                raise taken_over(sender.rank)
            if incarnation > row.incarnation:
                self._rows[sender.rank] = replace(row, incarnation=incarnation, number=0)

    def applied(self, sender: Sender) -> bool:
        """Whether an exchange is in the center."""
        with self._table:
            return sender.row.at <= self._row(sender).at

    def count(self, sender: Sender) -> tuple[int, int]:
        """Return how many exchanges were applied, and how many of others since this worker's last.

        Args:
            sender: the worker, at an exchange that is about to be applied.
        """
        with self._table:
            done = sum(row.exchanges for row in self._rows.values())
            others = done - self._row(sender).exchanges
            worker = sender.rank, sender.row.incarnation
            since = max(0, others - self._others.get(worker, sender.others))
            self._others[worker] = others
        return done, since

    def note(self, sender: Sender) -> None:
        """Record an exchange as applied, as far as it was not refused."""
        with self._table:
            known = self._row(sender)
            if self.restarted and sender.rank not in self._heard:
                self._heard.add(sender.rank)
                self.lost += max(0, sender.row.exchanges - 1 - known.exchanges)
            if sender.row.at >= known.at:
                self._rows[sender.rank] = sender.row

    def discount(self, sender: Sender) -> None:
        """Do not count a rank's last exchange: it has the steps and exchanges of `sender`."""
        with self._table:
            if self._row(sender).at == sender.row.at:
                self._rows[sender.rank] = sender.row

    def _row(self, sender: Sender) -> RankProgress:
        return self._rows.get(sender.rank, RankProgress())


class Replies:
    """The last replies to some ranks, for retries.

    A rank's next exchange acknowledges its last reply: the worker has it, or has given it up. The
    shard applies one exchange at a time, so there is no lock here.

    Args:
        nbytes: of each.
    """

    def __init__(self, nbytes: int) -> None:
        count, memory = _KEPT
        self._most = max(count, memory // max(1, nbytes))
        self._kept: dict[int, tuple[tuple[int, int], Reply]] = {}  # by rank; the oldest first

    def keep(self, sender: Sender, reply: Reply) -> None:
        """Keep the reply to an exchange, and forget the oldest if there are too many."""
        self._kept[sender.rank] = sender.row.at, reply
        while len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)))

    def to(self, sender: Sender) -> Reply | None:
        """Return the reply to an exchange, if it is kept."""
        at, reply = self._kept.get(sender.rank, (None, None))
        return reply if at == sender.row.at else None

    def forget(self, rank: int) -> None:
        """Forget a rank's last reply, which is acknowledged."""
        self._kept.pop(rank, None)


class Slots:
    """What ranks have contributed to rounds that are not reduced yet.

    Args:
        reduced: the last round whose mean the shard holds.
    """

    def __init__(self, reduced: int = 0) -> None:
        self.reduced = reduced
        self._kept: dict[int, dict[int, Message]] = {}  # by round and rank
        self._table = threading.Lock()

    def take(self, message: Message, number: int) -> None:
        """Keep what a worker has sent for a round, unless something later of its is here."""
        with self._table:
            if number > self.reduced:
                slots = self._kept.setdefault(number, {})
                known, sender = slots.get(message.sender.rank), message.sender
                if known is None or known.sender.row.at <= sender.row.at:
                    slots[sender.rank] = message

    def of_round(
        self, number: int, contributors: Sequence[int], asker: int
    ) -> tuple[list[Message], list[int]]:
        """Return the messages of a round in rank order, and the ranks whose are not here.

        Args:
            number: of the round.
            contributors: the ranks in it; none if not known: those whose messages are here.
            asker: a rank that is in it for certain.
        """
        with self._table:
            slots = self._kept.get(number, {})
            wanted = list(contributors) or sorted({*slots, asker})
            here = [slots[rank] for rank in sorted(wanted) if rank in slots]
            return here, [rank for rank in wanted if rank not in slots]

    def forget(self, number: int) -> None:
        """Let go of a round that is reduced now, and of those before it."""
        with self._table:
            self.reduced = number
            self._kept = {n: kept for n, kept in self._kept.items() if n > number}
