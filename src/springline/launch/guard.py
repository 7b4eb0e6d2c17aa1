"""Workers, and what they have started, end with their launcher, however it ends.

A guard is a process beside the launcher: this file, run with `-I -S`. It reads the numbers of
process groups, `+N` for one that has begun and `-N` for one that has ended. At the end of its
input, which is the end of the launcher, it kills what is left: with SIGKILL, since a script can
block or outlast every other signal. A center is made to survive it.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's side of its guard, which starts with the first group."""

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
            with contextlib.suppress(OSError):  # it was killed
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()

    def close(self) -> None:
        """End the guard."""
        process, self._process = self._process, None
        if process and process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()


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
