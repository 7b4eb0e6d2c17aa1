"""The way into Ray for the threads of this process, closed before the interpreter ends.

Ray then frees what a thread that waits for an answer still uses: the process would die of SIGSEGV
instead of ending as it should.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from springline.center.errors import EndedError

_PATIENCE = 10.0  # seconds; who waits for an answer is out again within two


class Door:
    """Knows who is inside. It takes no lock: a signal's handler may come at any moment.

    Args:
        connected: whether this process is in a cluster. Where it is not, Ray itself would connect
            anew, even when the interpreter is about to end.
    """

    def __init__(self, connected: Callable[[], bool]) -> None:
        self._connected = connected
        self.renew()

    def renew(self) -> None:
        """Begin anew, in a process that was forked: who was inside is not there."""
        self._inside: set[object] = set()
        self._closed = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Be inside, for any number of times.

        Raises:
            EndedError: this process leaves, or has left.
        """
        me = object()
        try:
            self._inside.add(me)  # first: who closes either sees us, or is seen
            if self._closed or not self._connected():
                raise EndedError("This process has left the Ray cluster. Start it again.")
            yield
        finally:
            self._inside.discard(me)

    def close(self, patience: float = _PATIENCE) -> bool:
        """Let nobody in any more, and wait until all are out; whether they are."""
        self._closed = True
        deadline = time.monotonic() + patience
        while self._inside and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._inside
