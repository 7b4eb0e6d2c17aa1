"""Signals wait while something must not be left half done.

Python runs a signal's handler between two instructions of the main thread, and what the handler
raises (a Ctrl-C, the death of a DataLoader's worker) comes out right there: between taking a lock
and noting that it is taken, perhaps. Within `deferred` handlers run where `deliver` is called, in a
wait, and else at the end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Those whose handlers raise something in users' programs: asking for all takes too long.
_NAMES = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "CHLD")
_NUMBERS = [getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}")]
_handlers: dict[int, Any] = {}  # the user's, while ours are in their place
_noted: list[int] = []  # signals that have come
_depth = 0  # how many blocks of the main thread are within each other


class deferred:  # noqa: N801 - used as a statement
    """Within the block no signal handler runs, but for where `deliver` is called."""

    def __enter__(self) -> None:
        global _depth
        self._main = threading.current_thread() is threading.main_thread()
        if not self._main:  # no handler ever runs there
            return
        if _depth == 0:
            _install()
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if not self._main:
            return
        _depth -= 1
        if _depth == 0:
            try:
                _restore()
            finally:
                _raise_again()


def deliver() -> None:
    """Run the handlers of the signals that have come. They may raise; no lock is being taken."""
    while _noted and threading.current_thread() is threading.main_thread():
        number = _noted.pop(0)
        _handlers[number](number, None)
        now = signal.getsignal(number)
        if now is not _note and callable(now):  # it has made another its successor
            _handlers[number] = now
            signal.signal(number, _note)


@contextlib.contextmanager
def noted(*numbers: int) -> Iterator[list[int]]:
    """Note the signals that come, in the list that this gives, instead of handling them.

    SIGHUP stays ignored where it is: by `nohup`.
    """
    heard: list[int] = []
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    ours = [n for n in numbers if not (n == signal.SIGHUP and nohup)]
    before = {n: signal.signal(n, lambda number, _: heard.append(number)) for n in ours}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(number: int, frame: FrameType | None) -> None:
    if _depth:
        _noted.append(number)
    else:  # we are just being installed, or about to go
        _handlers[number](number, frame)


def _install() -> None:
    found = ((number, signal.getsignal(number)) for number in _NUMBERS)
    ours = {number: handler for number, handler in found if callable(handler)}
    _handlers.update({n: handler for n, handler in ours.items() if handler is not _note})
    for number in ours:
        signal.signal(number, _note)


def _restore() -> None:
    raised: BaseException | None = None
    for number, handler in _handlers.items():
        try:
            if signal.getsignal(number) is _note:
                signal.signal(number, handler)
        except BaseException as error:  # by a handler that is back already; ours stay harmless
            raised = error
    if raised:
        raise raised


def _raise_again() -> None:
    if _noted:
        try:
            signal.raise_signal(_noted.pop(0))
        finally:
            _raise_again()
