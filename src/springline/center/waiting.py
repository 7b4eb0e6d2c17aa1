"""Waiting for other workers: never in silence, and with a timeout if one is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from springline.center.errors import RoundTimeoutError

WARN_EVERY = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3
_log = logging.getLogger("springline")


def wait_until(
    done: Callable[[], bool],
    missing: Callable[[], Collection[int | str]],
    timeout: float | None,
    what: str,
) -> None:
    """Ask `done` again and again, in pauses that grow from 0.05 to 5 ms.

    Args:
        done: whether the wait is over.
        missing: who is waited for, ranks or names, for the messages.
        timeout: seconds after which the wait fails; None for ever.
        what: what is waited for, for the messages.

    Raises:
        RoundTimeoutError: naming who is missing.
    """
    start = time.monotonic()
    warn_at = start + WARN_EVERY
    pause = _FIRST_PAUSE
    while not done():
        now = time.monotonic()
        if timeout is not None and now - start > timeout:
            raise RoundTimeoutError(
                f"Waited {timeout:g} s for {what}; missing: {_names(missing())}. Are they running? "
                "A larger `timeout` waits longer."
            )
        if now > warn_at:
            _log.warning("Waiting for %s since %.0f s: %s", what, now - start, _names(missing()))
            warn_at += WARN_EVERY
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)


def _names(missing: Collection[int | str]) -> str:
    names = (f"rank {who}" if isinstance(who, int) else who for who in sorted(missing, key=str))
    return ", ".join(names) or "nobody"
