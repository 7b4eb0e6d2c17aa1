"""One worker of a run as a process: started, signalled, its end noticed, its output kept.

RUN/logs/rank-K.log    what rank K prints, over all its lives
RUN/logs/ps-K.log      what parameter server K of a TensorFlow cluster prints
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from springline.launch import child
from springline.launch.cluster import Job, LocalCluster
from springline.launch.state import WorkerEntry

_TAIL = 64 * 1024  # bytes of a log that its last lines are looked for in
# glibc: keep freed memory instead of giving it back and faulting it in again at every exchange.
_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "9999999999",
    "MALLOC_ARENA_MAX": "1",
}
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """One rank of a run, or one of its parameter servers, over all its lives.

    Args:
        script: as the user typed it.
        arguments: the script's own.
        directory: the run's.
        rank: the worker's, or the server's number.
        workers: of the run.
        cluster: the run's, if it is a TensorFlow cluster.
        job: its job there.
    """

    def __init__(
        self,
        script: Path,
        arguments: list[str],
        directory: Path,
        rank: int,
        workers: int,
        cluster: LocalCluster | None = None,
        job: Job = "worker",
    ) -> None:
        self.entry = WorkerEntry(rank)
        self.name = f"worker {rank}" if job == "worker" else f"parameter server {rank}"
        kind = "rank" if job == "worker" else "ps"
        self.log = directory / "logs" / f"{kind}-{rank}.log"
        self._mark = f"--- {kind} {rank}, start "
        self._cluster = cluster
        self._job = job
        self.restart_at = 0.0
        self._directory = directory
        self._workers = workers
        self._script = [str(script), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

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
            now, start = time.strftime("%Y-%m-%d %H:%M:%S"), len(self.entry.starts)
            os.write(output, f"{self._mark}{start}, {now} ---\n".encode())
            launcher = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
            self._process = subprocess.Popen(  # noqa: S603 - the user's own script
                launcher + self._script,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        finally:
            os.close(output)
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

    def last_lines(self, count: int = 20) -> list[str]:
        """Return the last lines of its output, of its last life only."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return [f"(Its output cannot be read: {error}.)"]
        lines = text.splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith(self._mark)]
        return lines[starts[-1] + 1 if starts else 0 :][-count:]

    def _environment(self) -> dict[str, str]:
        rank = self.entry.rank
        ours = environment(os.environ, self._directory, rank, self._workers)
        if self._cluster:
            ours |= self._cluster.environment(self._job, rank, os.environ)
        if self._job == "ps":  # it has no rank
            del ours["SPRINGLINE_RANK"], ours["SPRINGLINE_WORKERS"]
        return ours


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


def describe_exit(code: int) -> str:
    """Say how a process ended.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'ended with status 3')
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
