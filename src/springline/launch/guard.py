"""Workers end with their launcher, however it ends, and so does what they have started.

This file is also run, with `-I -S`, in two ways:

With a launcher's process id and a command it is the beginning of a worker. It lets the kernel kill
this process with the launcher, and then replaces itself: the script has the interpreter, the
`sys.path`, the `__main__` and the tracebacks that it has without a launcher.

With nothing it is a process beside the launcher, for what workers have started, which the kernel
does not kill. It reads the numbers of process groups, `+N` for one that has begun and `-N` for one
that has ended. At the end of its input, which is the end of the launcher, it kills what is left.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


class Guard:
    """The launcher's side of the process beside it."""

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
        """End the process."""
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


def become(launcher: int, command: list[str]) -> None:
    """Replace this process by `command`; the kernel kills it when its launcher dies.

    With SIGKILL, since a script can block or outlast every other signal; a center is made to
    survive it. The setting stays over `exec`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit("The launcher is gone.")  # it died before we could ask
    os.execv(command[0], command)  # noqa: S606 - our own interpreter and the user's script


if __name__ == "__main__":
    if sys.argv[1:]:
        become(int(sys.argv[1]), [sys.executable, *sys.argv[2:]])
    else:
        watch()
