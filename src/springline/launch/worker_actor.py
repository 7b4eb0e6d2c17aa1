"""A worker on a machine of a Ray cluster: an actor that runs the script as a process there.

The process finds a directory of its own as the run's. The launcher keeps asking for what is new in
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
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from springline.center.extras import NAME as EXTRAS
from springline.cluster import Cluster
from springline.launch.directory import CENTER
from springline.launch.process import WorkerProcess, environment
from springline.run import REPORT, WARNINGS, Run

_POLL = 1.0  # seconds that the launcher's question waits for something new
_PAUSE = 0.1
_BACK = 10.0  # seconds in which a script that was there before may be back
_MOST = 1 << 24  # bytes of a file that grows in one answer
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
    """What an actor is to do: run a command, of one rank, with these additions to what is set."""

    command: list[str]  # the script, as the user typed it, and its arguments
    directory: str | None  # where it is run; None for where Ray has copied the working directory
    rank: int
    workers: int
    cluster: Cluster  # where the center is
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
class FilePart:
    """Bytes of a file of the worker's directory: what is new at its end, or all of it."""

    name: str
    version: int
    start: int
    data: bytes


@dataclass(frozen=True)
class News:
    """What is new of a worker."""

    actor: str  # the actor's incarnation; another one knows nothing of the process
    machine: str
    pid: int | None = None
    refused: str | None = None  # why it cannot be started there, if it cannot
    ended: bool = False
    code: int | None = None  # then
    stopping: bool = False  # whether it asks all workers to stop
    parts: tuple[FilePart, ...] = ()
    left: str | None = None  # where the script has left files of its own


class WorkerActor:
    """Runs one worker, as often as it is started, for as long as nothing happens to this machine.

    Args:
        assignment: what to do.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._given = assignment
        # Drawn with the run's name: one that was killed here has left the same directory.
        name = f"springline-{assignment.cluster.center}-{assignment.rank}"
        self._directory = Path(tempfile.gettempdir(), name)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._directory.is_symlink() or self._directory.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._directory} belongs to somebody else.")
        self._clear()
        util: Any = ray.util
        self._machine = f"{socket.gethostname()} ({util.get_node_ip_address()})"
        self._id = uuid.uuid4().hex
        self._turn = threading.Lock()  # calls may come twice
        self._start = 0
        self._process: WorkerProcess | None = None
        self._refused: str | None = None
        self._final: dict[str, Version] | None = None  # its files, when its end was seen

    def begin(self, start: int, starts: list[float], join: bool) -> News:
        """Start the script, once for each number.

        Args:
            start: the number of this start.
            starts: when the worker was started before, on whatever machine.
            join: whether the run's center has been made.
        """
        with self._turn:
            if start != self._start:
                self._start, self._final = start, None
                self._refused = self._problem()
                deadline = time.monotonic() + (_BACK if start > 1 else 0.0)
                while self._refused and time.monotonic() < deadline:
                    time.sleep(_PAUSE)
                    self._refused = self._problem()
                if not self._refused:
                    self._process = self._make_process(join)
                    self._process.entry.starts = list(starts)
                    self._process.start()
            pid = self._process.entry.pid if self._process else None
            return News(self._id, self._machine, pid, self._refused)

    def news(self, have: Mapping[str, Version], stopping: bool) -> News:
        """Return what is new, after a while if nothing is.

        Args:
            have: what the launcher has of each file.
            stopping: whether all workers have been asked to stop.
        """
        process, run = self._process, Run(self._directory)
        if process is None:
            return News(self._id, self._machine)
        if stopping:
            run.stop()
        deadline = time.monotonic() + _POLL
        while True:
            with self._turn:
                process.look()
                ended, code = not process.alive, process.entry.exit_code
                if ended and self._final is None:  # what it has left running may write for ever
                    self._final = self._files()
            parts, stops = tuple(self._parts(have)), run.stopping() and not stopping
            if ended or parts or stops or time.monotonic() > deadline:
                found = process.entry.pid, None, ended, code, stops, parts
                return News(self._id, self._machine, *found, self._left() if ended else None)
            time.sleep(_PAUSE)

    def send(self, number: int) -> None:
        """Send the process a signal."""
        with self._turn:
            if self._process:
                self._process.send(signal.Signals(number))

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        with self._turn:
            if self._process:
                self._process.kill()

    def close(self) -> None:
        """End, and leave nothing behind but what is the script's own."""
        self.kill()
        self._clear()
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def __ray_shutdown__(self) -> None:
        """Clean up before Ray ends this process."""
        self.close()

    def _clear(self) -> None:
        """Remove what is ours."""
        for name in (*self._given.files, "stop"):
            (self._directory / name).unlink(missing_ok=True)
        for name in ("logs", "metrics", CENTER):
            with contextlib.suppress(OSError):  # it is not there, or not empty
                (self._directory / name).rmdir()

    def _left(self) -> str | None:
        """Return where the script has left files of its own, if it has."""
        ours = {self._directory / name for name in (*self._given.files, "stop")}
        others = any(path not in ours for path in self._directory.rglob("*") if path.is_file())
        return f"{self._directory} on {self._machine}" if others else None

    def _problem(self) -> str | None:
        """Return what is wrong with the script on this machine."""
        folder = Path(self._given.directory) if self._given.directory else Path.cwd()
        script = folder / self._given.command[0]
        if folder.is_dir() and script.is_file() and os.access(script, os.R_OK):
            return None
        return (
            f"The script {script}, to be run from {folder}, is not on {self._machine}, or cannot "
            "be read there. Keep it in a directory that all machines see under the same name, or "
            "let it be copied to them with `--working-dir DIR`."
        )

    def _make_process(self, join: bool) -> WorkerProcess:
        given = self._given
        own = {k: v for k, v in os.environ.items() if k not in _RAYS} | given.environment
        ours = environment(own, self._directory, given.rank, given.workers)
        ours |= replace(given.cluster, join=join).environment()
        return WorkerProcess(given.command, self._directory, given.rank, ours, cwd=given.directory)

    def _files(self) -> dict[str, Version]:
        """Return which of the files that the run needs are there."""
        found = {}
        for name in self._given.files:
            with contextlib.suppress(OSError):
                status = (self._directory / name).stat()
                grows = name in self._given.growing
                found[name] = 0 if grows else status.st_mtime_ns, status.st_size
        return found

    def _parts(self, have: Mapping[str, Version]) -> Iterator[FilePart]:
        """Yield what the launcher has not."""
        for name, (version, size) in (self._final or self._files()).items():
            known, start = have.get(name, (version, 0))
            start = start if known == version else 0
            if start >= size:
                continue
            most = size - start if version else min(_MOST, size - start)
            with contextlib.suppress(OSError):  # it was replaced this very moment
                with (self._directory / name).open("rb") as file:
                    file.seek(start)
                    data = file.read(most)
                if data:
                    yield FilePart(name, version, start, data)
