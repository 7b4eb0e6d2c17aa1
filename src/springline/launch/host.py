"""A worker's host: an actor on a machine of the cluster that runs the script as a process there.

The process finds a directory of its own as the run's, from which the launcher fetches what it
writes (`fetch.py`). It dies with its host, and the host with the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from springline.center.errors import CheckpointError
from springline.center.served.storage import Storage
from springline.cluster import Cluster
from springline.launch.directory import LOCK
from springline.launch.fetch import Have, Piece, Stamps, pieces, stamps
from springline.launch.process import THREADS, WorkerProcess, environment
from springline.run import Run

_PREFIX = f"springline-{os.getuid()}-"
# What Ray tells its own processes, of which the script is none.
_RAYS = {
    "PYTHONBREAKPOINT",
    "RAY_CLIENT_MODE",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_RAYLET_PID",
}
_NEW = 60.0  # seconds
_SEEN = 10.0  # seconds after which what is written to a shared directory is seen everywhere
_TOKEN = ".token"  # noqa: S105 - a file's name


@dataclass(frozen=True)
class Assignment:
    """What a host is to do.

    Args:
        script: as the user typed it; below the working directory, if there is one.
        arguments: the script's own.
        directory: the one that the user was in; None if Ray copies it to every machine.
        rank: the worker's.
        workers: of the run.
        cluster: where the center is.
        environment: the launcher's, for what this machine's does not say.
        token: what the launcher wrote to the storage.
    """

    script: str
    arguments: list[str]
    directory: str | None
    rank: int
    workers: int
    cluster: Cluster
    environment: dict[str, str]
    token: str


@dataclass(frozen=True)
class Begun:
    """Where a worker has been started, or why it cannot be."""

    machine: str
    pid: int | None = None
    refused: str | None = None


@dataclass(frozen=True)
class News:
    """What is new of a worker.

    Args:
        ended: whether its process has.
        code: its exit code then.
        stopping: whether it asks all workers to stop.
        pieces: of its files.
    """

    ended: bool
    code: int | None
    stopping: bool
    pieces: list[Piece] = field(default_factory=list)


class Host:
    """Runs one worker, over several lives, for as long as nothing happens to this machine.

    Args:
        assignment: what to do.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = _lock(self._directory)
        self._life = 0
        self._process: WorkerProcess | None = None
        self._final: Stamps | None = None  # its files, when its end was seen
        self._machine = _machine()
        self._begun = Begun(self._machine)

    def begin(self, life: int, starts: list[float], join: bool) -> Begun:
        """Start the script, once in each life.

        Args:
            life: the number of this one.
            starts: when the worker was started before, on whatever machine.
            join: whether the run's center has been made.
        """
        if life != self._life:
            self._life, self._final = life, None
            refused = self._find_script() or self._check_storage()
            if refused:
                self._begun = Begun(self._machine, refused=refused)
            else:
                self._process = process = self._make_process(join)
                process.entry.starts = list(starts)
                process.start()
                self._begun = Begun(self._machine, process.entry.pid)
        return self._begun

    def news(self, have: Have, stopping: bool) -> News:
        """Return what is new.

        Args:
            have: what the launcher has.
            stopping: whether all workers have been asked to stop.
        """
        if stopping:
            Run(self._directory).stop()
        process = self._process
        if process:
            process.look()
        ended = process is not None and not process.alive
        code = process.entry.exit_code if process and ended else None
        if ended and self._final is None:  # what it has left running may write for ever
            self._final = stamps(self._directory)
        asked = (self._directory / "stop").exists()
        return News(ended, code, asked, pieces(self._directory, have, self._final))

    def send(self, number: int) -> None:
        """Send the process a signal."""
        if self._process:
            self._process.send(signal.Signals(number))

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        if self._process:
            self._process.kill()

    def close(self) -> None:
        """End, and leave nothing behind."""
        self.kill()
        os.close(self._lock)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _find_script(self) -> str | None:
        """Go to where the script is run from; return what is wrong with it on this machine."""
        given = self._assignment
        folder = Path(given.directory) if given.directory else Path.cwd()
        where = folder / given.script
        deadline = time.monotonic() + (_SEEN if self._life > 1 else 0.0)  # it was there before
        while not _is_readable(where) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not _is_readable(where):
            return (
                f"The script {where} is not on {self._machine}, or cannot be read there. Keep it "
                "in a directory that all machines see under the same name, or let it be copied to "
                "them with `--working-dir DIR`."
            )
        try:
            os.chdir(folder)
        except OSError as error:
            return (
                f"The script is run from {folder}, which cannot be used on {self._machine}: "
                f"{error.strerror}. Start from a directory that all machines see under the same "
                "name, or let one be copied to them with `--working-dir DIR`."
            )
        return None

    def _check_storage(self) -> str | None:
        place = self._assignment.cluster.storage
        if place is None:
            return None
        deadline = time.monotonic() + _SEEN
        while token_in(place) != self._assignment.token and time.monotonic() < deadline:
            time.sleep(0.2)
        problem = "what was written there elsewhere is not seen"
        if token_in(place) == self._assignment.token:
            problem = _problem_with_writing(place)
        return problem and (
            f"The center's checkpoints cannot be kept in {place} from {self._machine}: {problem}. "
            "Give a directory that all machines see and may write to, or an fsspec URL, with "
            "`--storage`."
        )

    def _make_process(self, join: bool) -> WorkerProcess:
        given = self._assignment
        own = {k: v for k, v in os.environ.items() if k not in _RAYS}
        own = {**given.environment, **own}
        own |= {name: given.environment[name] for name in THREADS if name in given.environment}
        ours = environment(own, self._directory, given.rank, given.workers)
        ours |= replace(given.cluster, join=join).environment()
        command = [given.script, *given.arguments]
        return WorkerProcess(command, self._directory, given.rank, ours)


def _is_readable(file: Path) -> bool:
    return file.is_file() and os.access(file, os.R_OK)


def put_token(place: str, token: str) -> None:
    """Write a token to a storage, for hosts to look for.

    Raises:
        CheckpointError: the storage cannot be used.
    """
    Storage(place).write(_TOKEN, {"token": token})


def token_in(place: str) -> str | None:
    """Return the token in a storage, if there is one that can be read."""
    if "://" not in place and not Path(place).is_dir():
        return None
    try:
        saved = Storage(place).read(_TOKEN)
    except CheckpointError:
        return None
    return str(saved[0]["token"]) if saved else None


def _problem_with_writing(place: str) -> str:
    """Try to write to a storage; return what is wrong."""
    if "://" not in place:
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            return str(error.strerror)
    return ""


def _machine() -> str:
    """Return the name and the address of this machine."""
    import ray  # we are an actor

    util: Any = ray.util
    return f"{socket.gethostname()} ({util.get_node_ip_address()})"


def _lock(directory: Path) -> int:
    """Hold a directory for as long as this process lives."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / LOCK, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def sweep(age: float = _NEW) -> None:
    """Remove the directories, of at least some age, of hosts that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue  # somebody else has made it
            if time.time() - status.st_mtime > age:  # else it may not be held yet
                os.close(_lock(directory))
                shutil.rmtree(directory)
