"""One worker of a run: started, looked at, signalled, killed, its output kept; and all, stopped.

RUN/logs/rank-K.log    what rank K prints, across restarts
RUN/logs/ps-K.log      what parameter server K of a TensorFlow cluster prints
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from springline.center.waiting import is_stopped
from springline.files import open_to_append
from springline.launch import guard as guards
from springline.launch_state import WorkerEntry
from springline.run import PROCESS_GROUP, WARNINGS

Job = Literal["ps", "worker"]
# Log lines of TensorFlow's and gRPC's C++ code, often after the script's own last line.
_LOGGED = re.compile(r"[IWEF]0000 |[IWEF]\d{4} \d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] ")
_TAIL = 64 * 1024  # bytes of a log that its last lines are looked for in
_TRACEBACK = 100  # lines of a traceback that is shown as a whole
# glibc: keep freed memory instead of giving it back and faulting it in again at every exchange.
_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "9999999999",
    "MALLOC_ARENA_MAX": "1",
}
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Seconds after a stop was requested, and the signal that remaining workers get then.
Steps = tuple[tuple[float, signal.Signals], ...]
USUAL: Steps = ((0.0, signal.SIGINT), (5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
# Without a parameter server a TensorFlow worker blocks in a call that ignores SIGINT.
WITHOUT_PS: Steps = ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))
AT_ONCE: Steps = ((0.0, signal.SIGKILL),)


class Task(ABC):
    """One rank of a run, or one of its parameter servers, across restarts.

    Args:
        directory: the run's.
        number: the worker's rank, or the server's number.
        job: which of the two it is.

    Attributes:
        entry: what is known of it.
        restart_at: when it is to be restarted, if it is.
    """

    def __init__(self, directory: Path, number: int, job: Job = "worker") -> None:
        self.entry = WorkerEntry(number)
        self.name = f"worker {number}" if job == "worker" else f"parameter server {number}"
        kind = "rank" if job == "worker" else "ps"
        self.log = directory / "logs" / f"{kind}-{number}.log"
        self._warnings = directory / WARNINGS / f"{kind}-{number}.txt"
        self._warned = self._warnings.stat().st_size if self._warnings.exists() else 0  # bytes
        self.restart_at = 0.0
        self._stopped = False
        self._mark = f"--- {kind} {number}, start "

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs or is starting, as of the last `look`."""

    @abstractmethod
    def start(self) -> None:
        """Start it."""

    @abstractmethod
    def look(self) -> bool:
        """Return whether it has ended since the last look; its entry then has the exit code."""

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it and all that it has started."""

    def release(self) -> None:
        """Release what it holds: it is not restarted."""

    def describe_end(self) -> str:
        """Describe how it ended."""
        code = self.entry.exit_code
        return "was lost" if code is None else describe_exit(code)

    def first_line(self) -> str:
        """Return the line that marks a restart in its log."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"{self._mark}{len(self.entry.starts)}, {now} ---\n"

    def newly_stopped(self) -> str | None:
        """Return a sentence if its process was stopped since the last call."""
        pid, before = self.entry.pid, self._stopped
        self._stopped = self.entry.machine is None and is_stopped(pid)  # else it is not here
        if before or not self._stopped:
            return None
        return (
            f"{self.name.capitalize()} (process {pid}) is stopped, by SIGSTOP or a debugger. It "
            f"goes on after `kill -CONT {pid}`."
        )

    def new_warnings(self) -> list[str]:
        """Return its warnings since the last call."""
        try:
            with self._warnings.open("rb") as file:
                file.seek(self._warned)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._warned += len(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def last_words(self) -> str:
        """Return its last line that is not a library's log message; empty if there is none."""
        lines = [line for line in self.last_lines(200) if line.strip()]
        return next((line for line in reversed(lines) if not _LOGGED.match(line)), "")

    def last_lines(self, count: int = 20) -> list[str]:
        """Return the last lines of its output since its last start, with all of a traceback."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return [f"(Its output cannot be read: {error}.)"]
        lines = text.splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith(self._mark)]
        lines = lines[starts[-1] + 1 if starts else 0 :]
        tracebacks = [n for n, line in enumerate(lines) if line.startswith("Traceback (most ")]
        if tracebacks and len(lines) - tracebacks[-1] <= _TRACEBACK:
            count = max(count, len(lines) - tracebacks[-1])
        return lines[-count:]


class WorkerProcess(Task):
    """A task as a process of this machine."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        number: int,
        environment: Mapping[str, str],
        job: Job = "worker",
        cwd: str | None = None,
        guard: guards.Guard | None = None,  # ends what it has started if this process is killed
    ) -> None:
        super().__init__(directory, number, job)
        self._command = list(command)
        self._cwd = cwd
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = guard

    @property
    def alive(self) -> bool:
        """Whether it runs, as of the last `look`."""
        return self._process is not None

    def start(self) -> None:
        """Start it, in a session of its own: the terminal's Ctrl-C goes to the launcher alone."""
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        output = open_to_append(self.log)
        try:
            self.entry.starts.append(time.time())
            os.write(output, self.first_line().encode())
            launcher = [sys.executable, "-I", "-S", guards.__file__, str(os.getpid())]
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

        What a dead worker has left running is killed before the worker is reaped: until then its
        process group id is not reused.
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
        """Send it a signal, even if it has just ended.

        Not by `Popen.send_signal`, which would reap it before `look` does.
        """
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


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


def describe_exit(code: int) -> str:
    """Describe how a process ended.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'ended with status 3')
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def environment(
    inherited: Mapping[str, str], directory: Path, rank: int, workers: int
) -> dict[str, str]:
    """Return a worker's environment: its place in the run, its share of the cores.

    A process group that the launcher is in, as in a pod of Kubeflow, is not the worker's.

    >>> ours = environment({"OMP_NUM_THREADS": "3"}, Path("/run"), 1, 2)
    >>> ours["SPRINGLINE_RUN"], ours["SPRINGLINE_RANK"], ours["MKL_NUM_THREADS"]
    ('/run', '1', '3')
    >>> "RANK" in environment({"RANK": "0", "WORLD_SIZE": "2"}, Path("/run"), 1, 2)
    False
    """
    share = inherited.get("OMP_NUM_THREADS") or str(max(1, cores() // workers))
    return {
        **_MEMORY,
        **dict.fromkeys(_THREADS, share),
        **{name: value for name, value in inherited.items() if name not in PROCESS_GROUP},
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
