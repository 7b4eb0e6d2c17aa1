"""A worker on a machine of a Ray cluster: an actor that runs the script as a process there.

The process has its own copy of the run's directory. The launcher polls the actor for what is new in
it (`ray_worker.py`). The process dies with the actor, and the actor with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from springline.center.extras import NAME as EXTRAS
from springline.cluster_address import ClusterAddress
from springline.launch.directory import CENTER
from springline.launch.process import WorkerProcess, environment
from springline.run import REPORT, WARNINGS, Run

_POLL = 1.0  # seconds that a poll of the launcher waits for something new
_PAUSE = 0.1
# What Ray sets for its own processes; the script is not one of them.
_RAYS = {
    "PYTHONBREAKPOINT",
    "RAY_CLIENT_MODE",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_RAYLET_PID",
}
# Of a file: when it was replaced, in ns (0 for one that only grows), and bytes of it.
Version = tuple[int, int]


@dataclass(frozen=True)
class Assignment:
    """What an actor runs: the command of one rank, with these additions to its environment."""

    command: list[str]  # what follows `python`: the script or `-m`, and so on
    directory: str | None  # where it is run; None for where Ray has copied the working directory
    rank: int
    workers: int
    cluster: ClusterAddress  # where the center is
    environment: dict[str, str]

    @property
    def growing(self) -> tuple[str, ...]:
        """Those of its files that grow."""
        rank = f"rank-{self.rank}"
        return f"logs/{rank}.log", f"metrics/{rank}.jsonl", f"{WARNINGS}/{rank}.txt"

    @property
    def files(self) -> tuple[str, ...]:
        """What the run needs of what the worker writes: files that grow, others replaced."""
        return (*self.growing, "total", REPORT, f"{CENTER}/{EXTRAS}")


@dataclass(frozen=True)
class Start:
    """A start of the script."""

    number: int
    before: list[float]  # when the worker was started before, on whatever machine
    join: bool  # whether the run's center has been made


@dataclass(frozen=True)
class FilePart:
    """Bytes of a file of the worker's directory: what is new at its end, or all of it."""

    name: str
    version: Version  # with these bytes
    data: bytes


@dataclass(frozen=True)
class News:
    """What has changed in a worker since the last poll."""

    machine: str
    refused: str | None = None  # why it cannot be started there, if it cannot
    pid: int | None = None
    ended: bool = False
    code: int | None = None  # then
    stopping: bool = False  # whether it asks all workers to stop
    parts: tuple[FilePart, ...] = ()
    left: str | None = None  # where the script has left files of its own


class WorkerActor:
    """Runs one worker on this machine, across restarts of the script."""

    def __init__(self, assignment: Assignment) -> None:
        self._given = assignment
        # Named after the run: an actor that was killed here has left the same directory.
        name = f"springline-{assignment.cluster.center}-{assignment.rank}"
        self._directory = Path(tempfile.gettempdir(), name)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._directory.is_symlink() or self._directory.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._directory} belongs to somebody else.")
        self._clear()
        util: Any = ray.util
        self._machine = f"{socket.gethostname()} ({util.get_node_ip_address()})"
        self._turn = threading.Lock()  # calls may be retried
        self._started = 0  # the number of the last start
        self._process: WorkerProcess | None = None

    def look(self, start: Start | None, have: Mapping[str, Version], stopping: bool) -> News:
        """Start the script, if this start is new; return what is new, after a while if nothing is.

        All that the worker has written is in the answer that reports its end.

        Args:
            start: the start to make; None once the launcher knows that it was made.
            have: how much the launcher has of each file.
            stopping: whether all workers have been asked to stop.
        """
        refused = self._begin(start) if start else None
        process, run = self._process, Run(self._directory)
        if process is None or refused:
            return News(self._machine, refused)
        if stopping:
            run.stop()
        deadline = time.monotonic() + (0.0 if start else _POLL)
        while True:
            with self._turn:
                process.look()
                pid, ended, code = process.entry.pid, not process.alive, process.entry.exit_code
            parts, stops = tuple(self._parts(have)), run.stopping() and not stopping
            if ended or parts or stops or time.monotonic() >= deadline:
                left = self._left() if ended else None
                return News(self._machine, None, pid, ended, code, stops, parts, left)
            time.sleep(_PAUSE)

    def send(self, number: int) -> None:
        """Send the process a signal; SIGKILL to all that it has started, too."""
        with self._turn:
            if self._process and number == signal.SIGKILL:
                self._process.kill()
            elif self._process:
                self._process.send(signal.Signals(number))

    def __ray_shutdown__(self) -> None:
        """Remove all files but the script's own: the launcher has dropped this actor."""
        self.send(signal.SIGKILL)
        self._clear()
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def _begin(self, start: Start) -> str | None:
        """Start the script, once for each number; return why it cannot be started here."""
        with self._turn:
            if start.number == self._started:
                return None
            given = self._given
            folder = Path(given.directory) if given.directory else Path.cwd()
            script = folder / given.command[0]
            there = given.command[0] == "-m" or (script.is_file() and os.access(script, os.R_OK))
            if not (folder.is_dir() and there):
                return (
                    f"The script {script}, to be run from {folder}, is not on {self._machine}, or "
                    "cannot be read there. Keep it in a directory that all machines see under the "
                    "same name, or let it be copied to them with `--working-dir DIR`."
                )
            own = {k: v for k, v in os.environ.items() if k not in _RAYS} | given.environment
            ours = environment(own, self._directory, given.rank, given.workers)
            ours |= replace(given.cluster, join=start.join).environment()
            self._process = WorkerProcess(
                given.command, self._directory, given.rank, ours, cwd=given.directory
            )
            self._process.entry.starts = list(start.before)
            self._process.start()
            self._started = start.number
            return None

    def _clear(self) -> None:
        """Remove what is ours."""
        for name in (*self._given.files, "stop"):
            (self._directory / name).unlink(missing_ok=True)
        for name in ("logs", "metrics", WARNINGS, CENTER):
            with contextlib.suppress(OSError):  # it is not there, or not empty
                (self._directory / name).rmdir()

    def _left(self) -> str | None:
        """Return where the script has left files of its own, if it has."""
        ours = {self._directory / name for name in (*self._given.files, "stop")}
        others = any(path not in ours for path in self._directory.rglob("*") if path.is_file())
        return f"{self._directory} on {self._machine}" if others else None

    def _parts(self, have: Mapping[str, Version]) -> Iterator[FilePart]:
        """Yield what the launcher does not have yet."""
        for name in self._given.files:
            with (
                contextlib.suppress(OSError),  # it is not there yet
                (self._directory / name).open("rb") as file,
            ):
                grows = name in self._given.growing
                replaced = 0 if grows else os.fstat(file.fileno()).st_mtime_ns
                known, stop = have.get(name, (replaced, 0))
                file.seek(stop if known == replaced else 0)
                if data := file.read():
                    yield FilePart(name, (replaced, file.tell()), data)
