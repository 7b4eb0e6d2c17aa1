"""Signals that end workers: the longer one takes after a stop was requested, the stronger."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from springline.launch.process import Task

# Seconds after a stop was requested, and the signal that remaining workers get then.
Steps = tuple[tuple[float, signal.Signals], ...]
USUAL: Steps = ((0.0, signal.SIGINT), (5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
# Without a parameter server a TensorFlow worker blocks in a call that ignores SIGINT.
WITHOUT_PS: Steps = ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))
AT_ONCE: Steps = ((0.0, signal.SIGKILL),)


class Pressure:
    """What workers get from now on until they end.

    Args:
        steps: seconds from now and the signal that is due then, in order.
    """

    def __init__(self, steps: Steps = USUAL) -> None:
        self._since, self._left = time.monotonic(), list(steps)

    def apply(self, workers: Iterable[Task]) -> None:
        """Send the signals that are due; each is sent once."""
        waited = time.monotonic() - self._since
        while self._left and waited >= self._left[0][0]:
            _, number = self._left.pop(0)
            for worker in workers:
                worker.kill() if number == signal.SIGKILL else worker.send(number)
