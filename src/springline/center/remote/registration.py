"""The record of a center in its storage, by which a head that restarts finds it."""

from __future__ import annotations

from typing import Any

from springline.center.plan import Plan
from springline.center.remote.storage import Storage
from springline.errors import CenterError

NAME = "head"


class Registration:
    """A center that a head makes, or finds.

    Attributes:
        description: what the center is; None before it is made.
        found: whether it was written down before this head was started.
        storage: where it is, opened.
    """

    def __init__(self, storage: str | None, name: str) -> None:
        self.description: dict[str, Any] | None = None
        self.found = False
        self.problem: CenterError | None = None  # with the storage
        self.storage: Storage | None = None
        self._plan: Plan | None = None
        self._place = storage
        self._name = name
        self._open()

    @property
    def plan(self) -> Plan | None:
        """The center's; None before it is made."""
        if self._plan is None and self.description:
            self._plan = Plan.from_json(self.description["plan"])
        return self._plan

    @property
    def base(self) -> int:
        """The version that the center was restored with."""
        return int((self.description or {}).get("base", 0))

    @property
    def seal(self) -> list[int]:
        """The mark, rank and incarnation of the worker that has sealed the center; else zeros."""
        return list((self.description or {}).get("seal", [0, 0, 0]))

    def find(self) -> dict[str, Any] | None:
        """Return what the center is; None if there is none.

        Raises:
            CenterError: the storage cannot be used.
        """
        if not self.is_there() and self.problem:
            raise self.problem
        return self.description

    def publish(self, description: dict[str, Any]) -> None:
        """Let the center be there."""
        if self.storage:
            self.storage.write(NAME, description)
        self.description = description

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
            self.storage = Storage(self._place)
            written = find_center(self.storage)
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
