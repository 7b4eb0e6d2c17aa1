"""One worker of a run as a process of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from springline.launch import child
from springline.launch.guard import Guard
from springline.launch.task import Job, Task

# glibc: keep freed memory instead of giving it back and faulting it in again at every exchange.
_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "9999999999",
    "MALLOC_ARENA_MAX": "1",
}
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess(Task):
    """One rank of a run, or one of its parameter servers, over all its lives.

    Args:
        command: the script, as the user typed it, and its arguments.
        directory: the run's.
        number: the worker's rank, or the server's number.
        environment: what it finds there.
        job: whether it is a worker or a server.
        cwd: the directory that it is run from; by default the one of this process.
        guard: ends what it has started if this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        number: int,
        environment: Mapping[str, str],
        job: Job = "worker",
        cwd: str | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(directory, number, job)
        self._command = list(command)
        self._cwd = cwd
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = guard

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as `look` has seen."""
        return self._process is not None

    def start(self) -> None:
        """Start it, in a session of its own: the terminal's Ctrl-C goes to the launcher alone."""
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        output = os.open(self.log, flags, 0o600)
        try:
            self.entry.starts.append(time.time())
            os.write(output, self.first_line().encode())
            launcher = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
            self._process = subprocess.Popen(  # noqa: S603 - the user's own script
                launcher + self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._cwd,
                start_new_session=True,
            )
        finally:
            os.close(output)
        if self._guard:
            self._guard.begun(self._process.pid)
        self.entry.pid, self.entry.state, self.entry.exit_code = self._process.pid, "running", None

    def look(self) -> bool:
        """Return whether it has ended since the last look; its entry then has the exit code.

        What a worker that died has left running dies with it. That is done before the process is
        reaped: until then the number of its group is not given to anybody else.
        """
        if self._process is None:
            return False
        pid = self._process.pid
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return False
        if end.si_status != 0:
            self.kill()
        if self._guard:
            self._guard.ended(pid)
        self.entry.exit_code, self.entry.pid = self._process.wait(), None
        self._process = None
        return True

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def environment(
    inherited: Mapping[str, str], directory: Path, rank: int, workers: int
) -> dict[str, str]:
    """Return a worker's environment: its place in the run, its share of the cores.

    >>> ours = environment({"OMP_NUM_THREADS": "3"}, Path("/run"), 1, 2)
    >>> ours["SPRINGLINE_RUN"], ours["SPRINGLINE_RANK"], ours["MKL_NUM_THREADS"]
    ('/run', '1', '3')
    """
    share = inherited.get("OMP_NUM_THREADS") or str(max(1, cores() // workers))
    return {
        **_MEMORY,
        **dict.fromkeys(_THREADS, share),
        **inherited,
        "PYTHONUNBUFFERED": "1",
        "SPRINGLINE_RUN": str(directory),
        "SPRINGLINE_RANK": str(rank),
        "SPRINGLINE_WORKERS": str(workers),
    }


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
