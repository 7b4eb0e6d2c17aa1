"""What a shard knows of each rank: how far it has come, and what of an exchange is applied."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from springline.center.errors import taken_over
from springline.center.served.messages import Row, Sender

At = tuple[int, int]  # a rank's life, and the number of one of its exchanges


class Book:
    """The rows of all ranks.

    Args:
        steps: of each rank, before this center.
    """

    def __init__(self, steps: Sequence[int] = ()) -> None:
        self._rows = {rank: Row(steps=n) for rank, n in enumerate(steps)}
        self._pieces: dict[int, tuple[At, int]] = {}  # of an exchange that is not whole: those here
        self._refused: dict[int, tuple[At, int]] = {}  # of the last exchange: the piece
        self._latest: dict[int, At] = {}  # of each rank, the exchange that was begun last
        self._turns: dict[int, threading.Lock] = {}
        self._back = False  # whether we were started again
        self._heard: set[int] = set()  # ranks that have exchanged since
        self.had = 0  # exchanges, when we were
        self.lost = 0  # exchanges that ranks had made, and of which nothing is known
        self._table = threading.Lock()  # of the dictionaries above

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Book:
        """Read what `to_json` wrote; storages may be older than streams are, and have rows only."""
        book = cls()
        book._rows = {int(rank): Row(*row) for rank, row in values["rows"].items()}
        book._pieces, book._refused = (
            {int(rank): ((life, number), n) for rank, (life, number, n) in found.items()}
            for found in (values.get("pieces", {}), values.get("refused", {}))
        )
        book._latest = {rank: (row.incarnation, row.number) for rank, row in book._rows.items()}
        book._latest |= {rank: at for rank, (at, _) in book._pieces.items()}
        book._back, book.had = True, sum(row.exchanges for row in book._rows.values())
        return book

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        with self._table:
            rows = {str(rank): row.to_json() for rank, row in self._rows.items()}
            pieces = {str(rank): [*at, n] for rank, (at, n) in self._pieces.items()}
            refused = {str(rank): [*at, n] for rank, (at, n) in self._refused.items()}
        return {"rows": rows, "pieces": pieces, "refused": refused}

    def rows(self) -> dict[int, Row]:
        """Return how far each rank has come, in the last life that has begun something."""
        with self._table:
            lives = {
                rank: max(row.incarnation, self._latest.get(rank, (0, 0))[0])
                for rank, row in self._rows.items()
            }
            begun = {rank: Row(life) for rank, (life, _) in self._latest.items()}
            return begun | {r: replace(row, incarnation=lives[r]) for r, row in self._rows.items()}

    @contextlib.contextmanager
    def alone(self, sender: Sender) -> Iterator[None]:
        """Let a rank do one thing at a time: the latest. What it had begun before makes room.

        Raises:
            TakenOverError: this is not the latest.
        """
        with self._table:
            self._begin(sender)
            turn = self._turns.setdefault(sender.rank, threading.Lock())
        with turn:
            self.check_latest(sender)
            yield

    def check(self, sender: Sender) -> None:
        """Refuse a rank's earlier lives."""
        with self._table:
            life, _ = self._begin(sender)
        if sender.incarnation < life:
            raise taken_over(sender.rank)

    def check_latest(self, sender: Sender) -> None:
        """Refuse an exchange if its rank has begun another one."""
        with self._table:
            latest = self._begin(sender)
        if sender.at < latest:
            raise taken_over(sender.rank)

    def _begin(self, sender: Sender) -> At:
        latest = max(self._latest.get(sender.rank, (0, 0)), sender.at)
        self._latest[sender.rank] = latest
        return latest

    def applied(self, sender: Sender) -> bool:
        """Whether an exchange is in the center."""
        with self._table:
            row = self._rows.get(sender.rank, Row())
        return sender.at <= (row.incarnation, row.number)

    def pieces(self, sender: Sender) -> int:
        """Return how many pieces are in the center of an exchange that is not there as a whole."""
        with self._table:
            at, pieces = self._pieces.get(sender.rank, (None, 0))
        return pieces if at == sender.at else 0

    def refused(self, sender: Sender) -> int | None:
        """Return the piece of an exchange that was refused, if one was."""
        with self._table:
            at, piece = self._refused.get(sender.rank, (None, 0))
        return piece if at == sender.at else None

    def note_pieces(self, sender: Sender, count: int) -> None:
        """Write down that so many pieces of an exchange are in the center."""
        with self._table:
            self._pieces[sender.rank] = sender.at, count

    def note(self, sender: Sender, refused: int | None = None) -> None:
        """Write down that an exchange is in the center, as far as it was not refused."""
        with self._table:
            self._pieces.pop(sender.rank, None)
            self._refused.pop(sender.rank, None)
            if refused is not None:
                self._refused[sender.rank] = sender.at, refused
            known = self._rows.get(sender.rank, Row())
            if self._back and sender.rank not in self._heard:
                self._heard.add(sender.rank)
                self.lost += max(0, sender.exchanges - 1 - known.exchanges)
            if sender.at >= (known.incarnation, known.number):
                done = sender.steps, sender.exchanges
                self._rows[sender.rank] = Row(*sender.at, *done, seconds=float(sender.seconds))

    def discount(self, rank: int, at: At, steps: int, exchanges: int) -> None:
        """Do not count a rank's last exchange, nor the steps that it was to bring."""
        with self._table:
            row = self._rows.get(rank, Row())
            if (row.incarnation, row.number) == tuple(at):
                self._rows[rank] = replace(row, steps=steps, exchanges=exchanges)
