"""Who is there: what the ranks of a process group tell each other by its store, when they wait.

A rank that waits for long says so again and again, and one whose communication has failed says
that. Who has said something before and is silent now is missing. The store is with rank 0, or with
`torchrun`, and may be gone as well: nobody waits for it for long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from springline.center.waiting import wait_until

_BEAT = 1.0  # seconds between two signs of a rank that waits
GRACE = 3.0  # seconds in which others have to give a sign
_PAUSE = 0.05
_FAILED = "failed"
_END = "the end"
_T = TypeVar("_T")


class Roll:
    """The signs of all ranks.

    Args:
        store: the group's.
        rank: our own.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._others = rank, set(range(size)) - {rank}
        self._point = ""
        self._waiting = threading.Event()
        self._turn = threading.Lock()  # of what we say: no beat after the last word
        self._thread: threading.Thread | None = None

    def meet(self, timeout: float) -> None:
        """Wait until all ranks are there.

        Raises:
            RoundTimeoutError: naming who is missing.
        """
        here = {rank: f"springline/here/{rank}" for rank in {self._rank, *self._others}}
        self._store.set(here[self._rank], "")

        def missing() -> list[int]:
            return [rank for rank, key in here.items() if not self._store.check([key])]

        wait_until(lambda: self._store.check(list(here.values())), missing, timeout, "the start")

    def wait_at(self, point: str) -> None:
        """Say from now on that we wait at some point."""
        self._point = point
        self._waiting.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="roll", daemon=True)
            self._thread.start()

    def go_on(self) -> None:
        """Wait no more; does not wait for the store."""
        self._waiting.clear()

    def missing(self, point: str, failed: bool) -> list[int] | None:
        """Return who gives no sign within a few seconds; None if that cannot be known.

        Args:
            point: where we are; others may be a round ahead, or have failed in the one before.
            failed: whether we can go no further, which is a sign for the others.
        """

        def ask() -> list[int]:
            if failed:
                self.go_on()
                with self._turn:
                    self._say(point, _FAILED)
            first, here = self._signs(), set[int]()
            end = time.monotonic() + GRACE
            while here != self._others and time.monotonic() < end:
                for rank, sign in self._signs().items():
                    if sign.endswith(_FAILED) or sign != first.get(rank):
                        here.add(rank)
                time.sleep(_PAUSE)
            return sorted(self._others - here)

        return _within(GRACE + 2, ask)

    def part(self) -> None:
        """Wait, for some seconds, until all ranks have come to their end."""

        def ask() -> None:
            with self._turn:
                self._say(_END)
            end = time.monotonic() + GRACE
            while time.monotonic() < end:
                signs = self._signs()
                if all(signs.get(rank, "").startswith(_END) for rank in self._others):
                    break
                time.sleep(_PAUSE)

        _within(GRACE + 2, ask)

    def _signs(self) -> dict[int, str]:
        """Return the last sign of everyone who has given one."""
        return {
            rank: self._store.get(self._key(rank)).decode()
            for rank in self._others
            if self._store.check([self._key(rank)])
        }

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody asks any more
            for number in range(10**9):
                self._waiting.wait()
                with self._turn:
                    if self._waiting.is_set():
                        self._say(self._point, str(number))
                time.sleep(_BEAT)

    def _say(self, point: str, sign: str = "") -> None:
        self._store.set(self._key(self._rank), f"{point} {sign}")

    def _key(self, rank: int) -> str:
        return f"springline/roll/{rank}"


def _within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """Return what is answered in time; None if nothing is."""
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
