"""The first moments of a worker: tie it to its launcher, then become `python SCRIPT ARGS…`.

Run as a file, with `-I -S`, so that nothing but these lines comes before the script. The process
then replaces itself, and the script has the interpreter, the `sys.path`, the `__main__` and the
tracebacks that it has without a launcher.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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
    become(int(sys.argv[1]), [sys.executable, *sys.argv[2:]])
