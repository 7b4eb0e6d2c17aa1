"""The checkpoints of one shard: when they are due, and a thread that writes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from springline.center.errors import CenterError
from springline.center.served.storage import Saved, Storage

_log = logging.getLogger("springline")


class Checkpoints:
    """Checkpoints of one name in a storage.

    Args:
        name: the shard's.
        place: the storage.
        every: exchanges, and seconds, from one checkpoint to the next, whichever comes first.
        collect: returns what is to be written.

    Attributes:
        problem: why the storage cannot be used, if it cannot.
    """

    def __init__(
        self, name: str, place: str, every: tuple[int, float], collect: Callable[[], Saved]
    ) -> None:
        self._name = name
        self.place = place
        self._exchanges, self._seconds = every
        self._collect = collect
        self._since = 0  # exchanges since the last checkpoint
        self._due = threading.Event()
        self._table = threading.Lock()
        self._saving = threading.Lock()
        self._storage: Storage | None = None
        self.problem: CenterError | None = None
        try:
            self._storage = Storage(place)
        except CenterError as error:
            self.problem = error

    def read(self) -> Saved | None:
        """Return the newest checkpoint, if there is one."""
        return self._storage.read(self._name) if self._storage else None

    def start(self) -> None:
        """Write checkpoints when they are due, from now on."""
        if self._storage:
            threading.Thread(target=self._keep, name="checkpoints", daemon=True).start()

    def count(self) -> None:
        """Count an exchange."""
        with self._table:
            self._since += 1
            if self._since >= self._exchanges:
                self._due.set()

    def save(self) -> None:
        """Write a checkpoint now."""
        if self._storage is None:
            return
        with self._saving:
            with self._table:
                since = self._since
            self._storage.write(self._name, *self._collect())
            with self._table:
                self._since -= since

    def _keep(self) -> None:
        """Write checkpoints for as long as the process lives."""
        while True:
            self._due.wait(self._seconds)
            self._due.clear()
            if self._since:
                try:
                    self.save()
                except Exception as error:  # the next one may do
                    _log.warning("No checkpoint of %s: %s", self._name, error)
