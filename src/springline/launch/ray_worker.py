"""One worker of a run on a Ray cluster: an actor that runs the script as a process of its machine.

The process has a directory of its own there. The launcher polls the actor with one idempotent call
that starts the script and returns what is new in that directory. Ray restarts an actor that dies,
on another machine if need be; the new one knows of no process, and the launcher starts the script
again. The process ends with its actor, and the actor with the launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from springline.center.extras import NAME as EXTRAS
from springline.files import append, write_text
from springline.launch.directory import CENTER
from springline.launch.process import Task, WorkerProcess, environment
from springline.run import FIRST_STEP, REPORT, WARNINGS, Run

_log = logging.getLogger("springline")
_EVERY = 0.3  # seconds between two polls
_PATIENCE = 5.0  # seconds without an answer after which a killed worker's actor is killed, too


def files_of(rank: int) -> dict[str, bool]:
    """Return what a run needs of what a worker writes: whether it grows, or is replaced."""
    growing = f"logs/rank-{rank}.log", f"metrics/rank-{rank}.jsonl", f"{WARNINGS}/rank-{rank}.txt"
    replaced = "total", REPORT, f"{CENTER}/{EXTRAS}"
    return {**dict.fromkeys(growing, True), **dict.fromkeys(replaced, False)}


@dataclass(frozen=True)
class News:
    """What an actor answers to a poll."""

    machine: str
    pid: int | None = None  # None if the script has ended, or the actor does not know of it
    code: int | None = None  # its exit code
    stopping: bool = False  # whether all workers are to stop
    # Of each file that has changed: a mark for the next poll, and what is new at its end, or all.
    files: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    left: str | None = None  # where the script has left files of its own


class WorkerActor:
    """Runs one worker on this machine, across restarts of the script.

    Args:
        command: what follows `python`: the script or `-m`, and so on.
        folder: where it is run; None for where Ray has copied the working directory.
        rank: the worker's.
        workers: how many there are.
    """

    def __init__(self, command: list[str], folder: str | None, rank: int, workers: int) -> None:
        self._command, self._folder = command, Path(folder or Path.cwd())
        self._rank, self._workers = rank, workers
        self._files = files_of(rank)
        self._directory = Path(tempfile.mkdtemp(prefix="springline-"))
        util: Any = ray.util
        self._machine = f"{socket.gethostname()} ({util.get_node_ip_address()})"
        self._number = 0  # of the last start
        self._process: WorkerProcess | None = None

    def poll(
        self, start: tuple[int, Mapping[str, str]] | None, have: Mapping[str, int], stopping: bool
    ) -> News:
        """Start the script, if this start is new; return what is new.

        All that the worker has written is in the answer that reports its end.

        Args:
            start: its number, and additions to the environment; None once it is known to be made.
            have: the mark of each file that the launcher has got.
            stopping: whether all workers have been asked to stop.
        """
        if start and start[0] != self._number:
            self._start(*start)
        if self._process is None:
            return News(self._machine)
        run = Run(self._directory)
        if stopping:
            run.stop()
        self._process.look()
        entry, files = self._process.entry, dict(self._changed(have))
        left = self._left() if entry.pid is None else None
        return News(self._machine, entry.pid, entry.exit_code, run.stopping(), files, left)

    def send(self, number: int) -> None:
        """Send the process a signal; SIGKILL to all that it has started, too."""
        if self._process and number == signal.SIGKILL:
            self._process.kill()
        elif self._process:
            self._process.send(signal.Signals(number))

    def __ray_shutdown__(self) -> None:
        """Remove the directory, unless there are files of the script's own."""
        self.send(signal.SIGKILL)
        if not self._left():
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, number: int, added: Mapping[str, str]) -> None:
        script = self._folder / self._command[0]
        there = self._command[0] == "-m" or (script.is_file() and os.access(script, os.R_OK))
        if not there:
            raise FileNotFoundError(
                f"{script} is not on {self._machine}, or cannot be read there. Keep the script in "
                "a directory that all machines see, or copy it to them with `--working-dir DIR`"
            )
        for name in (name for name, grows in self._files.items() if grows):
            (self._directory / name).unlink(missing_ok=True)  # the launcher has it
        ours = environment({**os.environ, **added}, self._directory, self._rank, self._workers)
        for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"):  # the actor's, not the script's
            ours.pop(name, None)
        where = str(self._folder)
        process = WorkerProcess(self._command, self._directory, self._rank, ours, cwd=where)
        process.entry.starts = [0.0] * (number - 1)
        process.start()
        self._process, self._number = process, number

    def _left(self) -> str | None:
        """Return where the script has left files of its own, if it has."""
        ours = {self._directory / name for name in (*self._files, "stop", FIRST_STEP)}
        others = any(path not in ours for path in self._directory.rglob("*") if path.is_file())
        return f"{self._directory} on {self._machine}" if others else None

    def _changed(self, have: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, bytes]]]:
        """Yield what the launcher does not have yet."""
        for name, grows in self._files.items():
            with (
                contextlib.suppress(OSError),  # it is not there yet
                (self._directory / name).open("rb") as file,
            ):
                known, status = have.get(name, 0), os.fstat(file.fileno())
                if known == (status.st_size if grows else status.st_mtime_ns):
                    continue
                file.seek(known if grows else 0)
                data = file.read()
                yield name, (file.tell() if grows else status.st_mtime_ns, data)


class RayWorker(Task):
    """One rank of a run on a cluster, over all its starts: the launcher's end of its actor.

    Args:
        directory: the run's.
        rank: the worker's.
        create: creates its actor.
        added: returns what a start adds to the environment of the machine that it is on.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        create: Callable[[], Any],
        added: Callable[[], dict[str, str]],
    ) -> None:
        super().__init__(directory, rank)
        self._directory = directory
        self._create, self._added = create, added
        self._actor: Any = None
        self._asked: Any = None  # the answer to come
        self._begin: tuple[int, dict[str, str]] | None = None  # a start that has no answer yet
        self._have: dict[str, int] = {}
        self._alive = self._killed = False
        self._away = ""  # why it was lost
        self._heard = 0.0  # when its actor last answered, or it was started

    @property
    def alive(self) -> bool:
        """Whether it runs or is starting, as of the last `look`."""
        return self._alive

    @property
    def waits(self) -> float:
        """Seconds since its actor last answered."""
        return time.monotonic() - self._heard if self._alive else 0.0

    def start(self) -> None:
        """Start it through its actor, which is created if there is none."""
        if self._actor is None:
            self._actor = self._create()
        self.entry.starts.append(time.time())
        self._begin, self._have = (len(self.entry.starts), self._added()), {}
        self._alive, self._killed, self._asked = True, False, None
        self._heard = time.monotonic()
        self.entry.state, self.entry.machine = "starting", None
        self.entry.pid = self.entry.exit_code = None

    def look(self) -> bool:
        """Return whether it has ended since the last look; its entry then has the exit code.

        What it has printed and logged is in the run's directory by then, unless it was lost with
        its machine.
        """
        if not self._alive:
            return False
        try:
            if self._killed and (self._begin or self.waits > _PATIENCE):
                ray.kill(self._actor)
                return self._lose(TimeoutError("it did not end"))
            if self._asked is None:
                if self._begin or self.waits > _EVERY:
                    stopping = Run(self._directory).stopping()
                    self._asked = self._actor.poll.remote(self._begin, self._have, stopping)
                return False
            if not ray.wait([self._asked], timeout=0)[0]:
                return False
            asked, self._asked = self._asked, None
            return self._hear(ray.get(asked))
        except RayError as error:
            return self._lose(error)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._alive and not self._begin:
            self._actor.send.remote(int(number))
        else:
            self._killed = True  # there is no process yet

    def kill(self) -> None:
        """Kill it and all that it has started; its actor as well, if that does not answer."""
        self._killed = True
        self.send(signal.SIGKILL)

    def release(self) -> None:
        """Drop the handle of its actor, which then cleans up and ends."""
        self._actor = self._asked = None

    def describe_end(self) -> str:
        """Describe how it ended."""
        if self.entry.exit_code is not None:
            return super().describe_end()
        return f"was lost{f' on {self.entry.machine}' if self.entry.machine else ''}: {self._away}"

    def _hear(self, news: News) -> bool:
        self._heard = time.monotonic()
        if news.pid is None and news.code is None:
            return self._end(None, "its actor or its machine died")  # Ray has restarted the actor
        self._begin, self.entry.machine = None, news.machine
        self.entry.pid, self.entry.state = news.pid, "running"
        for name, grows in files_of(self.entry.rank).items():
            if name in news.files:
                self._have[name], data = news.files[name]
                self._write(self._directory / name, data, grows)
        if news.stopping:
            Run(self._directory).stop()
        if news.left:
            _log.warning("%s has left files in %s.", self.name.capitalize(), news.left)
        return news.pid is None and self._end(news.code)

    def _end(self, code: int | None, why: str = "") -> bool:
        self.entry.exit_code, self.entry.pid, self._alive, self._away = code, None, False, why
        return True

    def _lose(self, error: Exception) -> bool:
        """Drop the actor; the next start creates another."""
        self.release()
        return self._end(None, _last_line(error))

    def _write(self, path: Path, data: bytes, grows: bool) -> None:
        """Write what is new of a file; what cannot be written is skipped with a warning."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(path, data) if grows else write_text(path, data)
        except OSError as error:
            _log.warning("Some of what %s has written is lost: %s", self.name, error)


def _last_line(error: Exception) -> str:
    """Return the last line of Ray's error that is not empty: why the actor is gone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
