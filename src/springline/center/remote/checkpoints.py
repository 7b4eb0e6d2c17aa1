"""The checkpoints of one shard: when they are due, and a thread that writes them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from springline.center.remote.storage import FencedError, Saved, Storage

_log = logging.getLogger("springline")


class Checkpoints:
    """Checkpoints of one name in a storage.

    Args:
        name: the shard's.
        place: the storage.
        every: exchanges, and seconds, from one checkpoint to the next, whichever comes first.
        collect: returns what is to be written.

    Attributes:
        failed: why the last one could not be written, if it could not.
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
        self.failed: str | None = None

    def open(self) -> Storage:
        """Open the storage, unless it is.

        Raises:
            CheckpointError: it cannot be used.
        """
        if self._storage is None:
            self._storage = Storage(self.place)
            name = f"checkpoints of {self._name}"
            threading.Thread(target=self._keep, name=name, daemon=True).start()
        return self._storage

    def read(self) -> Saved | None:
        """Return the newest checkpoint, if there is one."""
        return self.open().read(self._name)

    def count(self) -> None:
        """Count an exchange."""
        with self._table:
            self._since += 1
            if self._since >= self._exchanges:
                self._due.set()

    def save(self) -> None:
        """Write a checkpoint now."""
        with self._saving:
            with self._table:
                since = self._since
            self.open().write(self._name, *self._collect())
            with self._table:
                self._since -= since

    def _keep(self) -> None:
        """Write checkpoints until the process ends or a later epoch fences it."""
        while True:
            self._due.wait(self._seconds)
            self._due.clear()
            if not self._since:
                continue
            try:
                self.save()
                self.failed = None
            except Exception as error:  # the next one may do
                self.failed = f"{type(error).__name__}: {error}"
                _log.warning("No checkpoint of %s: %s", self._name, error)
                if isinstance(error, FencedError):
                    return
                time.sleep(self._seconds)  # not at every exchange from now on
