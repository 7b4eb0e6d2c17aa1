"""A process beside the launcher that outlives it for a moment, to end what workers have started.

The kernel kills the workers of a launcher that was killed, but not their own children. Run as a
file, it reads the numbers of process groups, `+N` for one that has begun and `-N` for one that has
ended. At the end of its input, which is the end of the launcher, it kills those that are left.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's side of it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begun(self, group: int) -> None:
        """Kill this group if the launcher dies."""
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 - these very lines
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C is not for it
            )
        self._write(f"+{group}\n")

    def ended(self, group: int) -> None:
        """Forget this group: its number may soon be another's."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):  # somebody has killed it
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()


def watch() -> None:
    """Read until the launcher is gone, then kill."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line[1:])
        groups.add(number) if line[0] == "+" else groups.discard(number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    watch()
