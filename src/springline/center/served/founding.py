"""How a served center comes to be: made by one, written down, found again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from springline.center.errors import CenterError
from springline.center.served.storage import Storage

_TICK = 0.25  # seconds between two looks whether the center is there
_LEASE = 30.0  # seconds that whoever makes the center may be silent
NAME = "head"


class Founding:
    """What a head knows of its center, and who is to make it.

    Args:
        storage: where it is written down, if anywhere.
        name: the center's.

    Attributes:
        description: what the center is; None before it is made.
        found: whether it was written down before this head was started.
    """

    def __init__(self, storage: str | None, name: str) -> None:
        self.description: dict[str, Any] | None = None
        self.found = False
        self.problem: CenterError | None = None  # with the storage, said to whoever comes
        self._place = storage
        self._name = name
        self._storage: Storage | None = None
        self._creator: tuple[str, float] | None = None
        self._open()

    async def claim(self, who: str) -> dict[str, Any] | None:
        """Wait for the center; or return None to one caller, who is to make it and to `publish`.

        That one calls again while it is at it. Should it not for half a minute, another may.
        """
        while not self.is_there():
            if self.problem:
                raise self.problem
            now = time.monotonic()
            if self._creator is None or who == self._creator[0] or now > self._creator[1]:
                self._creator = who, now + _LEASE
                return None
            await asyncio.sleep(_TICK)
        return self.description

    async def makes(self, who: str) -> bool:
        """Whether somebody is still the one who is to make the center."""
        return self.description is None and self._creator is not None and self._creator[0] == who

    @property
    def claimed(self) -> bool:
        """Whether somebody is making the center."""
        return self._creator is not None

    async def publish(self, who: str, description: dict[str, Any]) -> bool:
        """Let the center be there; False if another has made it meanwhile."""
        if not await self.makes(who):
            return False
        if self._storage:
            self._storage.write(NAME, description)
        self.description = description
        return True

    async def misses(self, names: list[str]) -> list[str]:
        """Return those of which there is nothing in the storage as this head sees it."""
        storage = self._storage
        return [name for name in names if storage is None or not storage.holds(name)]

    async def release(self, who: str) -> None:
        """Let another make the center: this one could not."""
        if self._creator and self._creator[0] == who:
            self._creator = None

    def is_there(self) -> bool:
        """Whether there is a center; a storage that could not be read is tried again."""
        if self.problem:
            self._open()
        return self.description is not None

    def _open(self) -> None:
        """Open the storage; the center is there if it is written down in it."""
        self.problem = None
        if self._place is None:
            return
        try:
            self._storage = Storage(self._place)
            written = find_center(self._storage)
        except CenterError as error:
            self.problem = error
            return
        owner = (written or {}).get("name", self._name)
        if owner != self._name:
            self.problem = CenterError(
                f"The storage {self._place} belongs to the center {owner!r}; this one is "
                f"{self._name!r}. Give every center a storage of its own, or go on with {owner!r}."
            )
        elif written:
            self.description, self.found = {**written, "storage": self._place}, True


def find_center(storage: Storage) -> dict[str, Any] | None:
    """Return what a head has written down of its center, if there is anything."""
    saved = storage.read(NAME)
    return saved[0] if saved else None
