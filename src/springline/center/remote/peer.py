"""The other side of a call: a head or a shard, in another process or on another machine.

A call may be lost on its way there or on its way back, and the caller cannot know which. So
every call is retried until it is answered, and must be idempotent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from springline.center.waiting import WARN_EVERY
from springline.errors import CenterError
from springline.signals import deliver

_PAUSE = 0.2  # seconds before a call to a lost peer is retried
_LOOK = 1.0  # seconds between two looks at the clock while a call is under way
_log = logging.getLogger("springline")


class PeerLostError(Exception):
    """A peer died, restarts or cannot be reached: the call may or may not have been carried out."""


class NotHereError(TimeoutError):
    """The answer is not here yet."""


class Pending(Protocol):
    """A call that is under way."""

    def result(self, timeout: float) -> Any:
        """Return the answer, or raise what the call raised.

        Raises:
            NotHereError: it is not here yet; try again.
            PeerLostError: it will not come.
        """


class Peer(Protocol):
    """A head or a shard."""

    name: str

    def ask(self, method: str, *arguments: Any) -> Pending:
        """Begin a call."""

    def tell(self, method: str, *arguments: Any) -> None:
        """Make a call without waiting for the answer."""


class Call:
    """A call that is retried until it is answered.

    Args:
        peer: the one that is called.
        method: what of it.
        arguments: for it; they must not change before the answer is there.
        timeout: seconds without an answer after which the call fails; None for ever, with a
            warning every 30 seconds.
        check: is called when there is no answer yet, and may raise: it is not wanted any more.
    """

    def __init__(
        self,
        peer: Peer,
        method: str,
        *arguments: Any,
        timeout: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._peer = peer
        self._method = method
        self._arguments = arguments
        self._timeout = timeout
        self._check = check
        self._pending = peer.ask(method, *arguments)

    def result(self) -> Any:
        """Return the answer, or raise what the call raised.

        Raises:
            CenterError: there was none in time, or it is not wanted any more.
        """
        start = time.monotonic()
        warn_at = start + WARN_EVERY
        warned = False
        while True:
            deliver()
            try:
                answer = self._pending.result(_LOOK if self._timeout is None else _PAUSE)
            except NotHereError:
                lost = False
            except PeerLostError as error:
                lost = True
                if not warned:
                    _log.warning("%s is gone. Retrying. (%s)", self._peer.name, error)
                warned = True
            else:
                if warned:
                    passed = time.monotonic() - start
                    _log.warning("%s is back after %.1f s.", self._peer.name, passed)
                return answer
            if self._check:
                self._check()
            waited = time.monotonic() - start
            if self._timeout is not None and waited > self._timeout:
                raise CenterError(
                    f"{self._peer.name} has not answered for {waited:.0f} s. Is its machine up, "
                    "and can it be reached? A larger `timeout` waits longer."
                )
            if time.monotonic() > warn_at:
                _log.warning("Still waiting for %s after %.0f s.", self._peer.name, waited)
                warn_at += WARN_EVERY
            if lost:
                time.sleep(_PAUSE)
                self._pending = self._peer.ask(self._method, *self._arguments)
