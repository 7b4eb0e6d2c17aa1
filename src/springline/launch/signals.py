"""The signals that ask a launcher to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def hearing() -> Iterator[list[int]]:
    """Note the signals that come, in the list that this gives."""
    heard: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        heard.append(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
    numbers = [n for n in _NUMBERS if not (n == signal.SIGHUP and ignored)]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
