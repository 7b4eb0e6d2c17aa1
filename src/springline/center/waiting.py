"""Waiting for other workers: never in silence, and with a timeout if one is given."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from springline.errors import RoundTimeoutError
from springline.signals import deliver

WARN_AFTER, WARN_EVERY = 5.0, 30.0  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone"}
_log = logging.getLogger("springline")
_warned: list[float] = []  # when this process last warned that it waits


def wait_until(
    done: Callable[[], bool],
    missing: Callable[[], Collection[int | str]],
    timeout: float | None,
    what: str,
) -> None:
    """Poll `done`, in pauses that grow from 0.05 to 5 ms.

    Args:
        done: whether the wait is over.
        missing: ranks or names that are waited for, for the messages.
        timeout: seconds after which the wait fails; None for ever.
        what: what is waited for, for the messages.

    Raises:
        RoundTimeoutError: naming the missing.
    """
    start = time.monotonic()
    pause = _FIRST_PAUSE
    while not done():
        deliver()
        waited = time.monotonic() - start
        if timeout is not None and waited > timeout:
            raise RoundTimeoutError(
                f"Waited {timeout:g} s for {what}; missing: {_names(missing())}. Are they running? "
                "A larger `timeout` waits longer."
            )
        if waited > WARN_AFTER and (not _warned or time.monotonic() > _warned[0] + WARN_EVERY):
            _warned[:] = [time.monotonic()]
            _log.warning("Still waiting for %s after %.0f s: %s", what, waited, _names(missing()))
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)


def is_stopped(process: int | None) -> bool:
    """Whether a process is suspended: after SIGSTOP, or in a debugger."""
    return process is not None and "stopped" in _state(process)


def is_alive(process: int | None) -> bool:
    """Whether there is such a process, and it has not ended."""
    return process is not None and _state(process) != "gone"


def describe_process(process: int) -> str:
    """Return a process's id and what it is doing, in words."""
    return f"process {process}, {_state(process)}"


def describe_rank(rank: int, process: int, more: str = "") -> str:
    """Return a rank, its process and what that is doing, in words."""
    return f"rank {rank} ({describe_process(process)}{more})"


def _state(process: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
        return _STATES.get(text.rpartition(")")[2].split()[0], "running")
    return "gone"


def _names(missing: Collection[int | str]) -> str:
    names = (f"rank {who}" if isinstance(who, int) else who for who in sorted(missing, key=str))
    return ", ".join(names) or "no rank (all have arrived, but it is not complete yet)"
