"""The way into Ray for the threads of this process, closed before it leaves the cluster.

When the interpreter ends, or on `ray.shutdown()`, Ray frees what a thread that waits for an answer
still uses: the process would die of SIGSEGV instead of ending as it should.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from springline.center.errors import EndedError

_PATIENCE = 10.0  # seconds; who waits for an answer is out again within two


class Door:
    """Counts who is inside.

    Args:
        connected: whether this process is in a cluster. Where it is not, Ray itself would connect
            anew, even when the interpreter is about to end.
    """

    def __init__(self, connected: Callable[[], bool]) -> None:
        self._connected = connected
        self.renew()

    def renew(self) -> None:
        """Begin anew, in a process that was forked: who was inside is not there."""
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def open(self) -> None:
        """Let threads in again."""
        self._closed = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Be inside.

        Raises:
            EndedError: this process leaves, or has left.
        """
        with self._changed:
            if self._closed or not self._connected():
                raise EndedError("This process has left the Ray cluster. Start it again.")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self, patience: float = _PATIENCE) -> bool:
        """Let nobody in any more, and wait until all are out; whether they are."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, patience)
