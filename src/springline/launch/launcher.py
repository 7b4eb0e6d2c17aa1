"""Starts the workers of a run, watches them, restarts those that die, and ends the run well."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from springline.center import CenterError
from springline.launch.cluster import Job, LocalCluster
from springline.launch.directory import LaunchError, RunDirectory
from springline.launch.keeper import Keeper
from springline.launch.process import WorkerProcess, cores, describe_exit
from springline.launch.state import NAME, LaunchState
from springline.run import Run

_LOOK = 0.1  # seconds between two looks at the workers
_PAUSE = 0.5  # seconds before a worker that died is started again
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds after a stop was asked for, and what workers that are still there get then.
_PRESSURE = ((0.0, signal.SIGINT), (5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
# Without a parameter server a worker of TensorFlow waits in a call that hears no SIGINT.
_PRESSURE_WITHOUT_PS = ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))


class Launcher:
    """One run: its directory is claimed at once, `run` does the rest.

    Args:
        script: what every worker runs.
        arguments: the script's own.
        workers: how many; by default as many as the run in the directory has, else one per core
            and at least two.
        ps: how many parameter servers of a TensorFlow cluster to start beside them, which then
            hold the center; by default as many as the run in the directory has, else none.
        directory: the run's; None for a new one in `runs/`.
        max_restarts: how many times each worker that dies is started again.
        checkpoint_every: seconds from one checkpoint of the center to the next.
        say: told in a sentence what happens to workers.

    Raises:
        LaunchError: the run cannot start; nothing was done.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        workers: int | None = None,
        ps: int | None = None,
        directory: Path | None = None,
        max_restarts: int = 3,
        checkpoint_every: float = 30.0,
        say: Callable[[str], None] = print,
    ) -> None:
        _check(script, workers, ps, max_restarts)
        self._place = RunDirectory(directory)
        self.directory = self._place.path
        self.continues = self._place.continues
        try:
            before = LaunchState.last(self.directory)
            self.ps = (len(before.ps) if before else 0) if ps is None else ps
            if self.ps and workers is None and before and before.ps:
                workers = len(before.workers)
            self.workers = self._number(workers)
            self._cluster = LocalCluster(self.ps, self.workers) if self.ps else None
        except BaseException:
            self._place.release()
            raise
        self.center: Path | None = None  # where it is, at the end
        self.failed: WorkerProcess | None = None  # the one that ended the run
        self._max_restarts = max_restarts
        self._say = say
        self._keeper = Keeper(self.directory, checkpoint_every, self._tell)

        def task(number: int, job: Job) -> WorkerProcess:
            place = self.directory, number, self.workers
            return WorkerProcess(script, list(arguments), *place, self._cluster, job)

        self._processes = [task(rank, "worker") for rank in range(self.workers)]
        self._servers = [task(number, "ps") for number in range(self.ps)]
        self._state = LaunchState(
            str(script.absolute()),
            list(arguments),
            time.time(),
            os.getpid(),
            [process.entry for process in self._processes],
            ps=[server.entry for server in self._servers],
        )
        self._state.go_on(self.directory)
        self._written: dict[str, Any] = {}
        self._heard: list[int] = []  # signals that have come
        self._status: int | None = None  # set when the run is to stop early
        self._stopping_since = 0.0
        self._pressure = list(_PRESSURE)

    def run(self, tick: Callable[[], None] = lambda: None) -> int:
        """Start the workers and stay until all have ended. For the main thread, once.

        Args:
            tick: called several times a second.

        Returns:
            The exit status: 0 if every worker finished, 1 if one failed for good, 128 + its number
            if a signal ended the run.
        """
        self._keeper.start()
        try:
            with self._hearing():
                try:
                    for process in (*self._servers, *self._processes):
                        process.start()
                    self._watch(tick)
                finally:  # also if `tick` fails: no worker stays behind, the center is saved
                    if self._going():
                        self._stop(1)
                    self._watch(lambda: None)
                    self._end_servers()
                    self._keep_center()
                    self._state.ended = time.time()
                    self._record()
        finally:
            self._place.release()
            if self._cluster:
                self._cluster.release()
        return self._status or 0

    def _watch(self, tick: Callable[[], None]) -> None:
        while self._going():
            self._hear()
            for server in self._servers:
                self._look_at_server(server)
            for process in self._processes:
                self._look(process)
            self._press()
            self._record()
            tick()
            time.sleep(_LOOK)

    def _going(self) -> bool:
        return any(p.alive or p.entry.state == "restarting" for p in self._processes)

    def _look(self, process: WorkerProcess) -> None:
        """Notice a worker's end; start it again when its pause is over."""
        entry = process.entry
        if process.look():
            self._ended(process)
        elif entry.state == "restarting" and time.monotonic() >= process.restart_at:
            entry.restarts += 1
            process.start()

    def _look_at_server(self, server: WorkerProcess) -> None:
        """Notice a parameter server's end, which is the end of the run: its center is gone."""
        if not server.look():
            return
        if self._status is not None:
            server.entry.state = "stopped"
            return
        server.entry.state, self.failed = "failed", server
        self._stop(1)
        self._pressure = list(_PRESSURE_WITHOUT_PS)
        how = f"{server.name.capitalize()} {describe_exit(server.entry.exit_code or 0)}"
        if server.entry.exit_code == 0:
            self._tell(
                f"{how}: the run ends. Does the script call `springline.tensorflow.cluster()`, "
                "which serves there and does not return?"
            )
        else:
            self._tell(
                f"{how}, and its part of the center is gone: the run ends. It can go on from the "
                "last checkpoint that the script has saved."
            )

    def _end_servers(self) -> None:
        """End the parameter servers, when no worker needs them any more."""
        for server in self._servers:
            server.kill()
        for server in self._servers:
            while server.alive:
                if server.look():
                    server.entry.state = "stopped"
                else:
                    time.sleep(_LOOK)

    def _ended(self, process: WorkerProcess) -> None:
        entry = process.entry
        how = f"{process.name.capitalize()} {describe_exit(entry.exit_code or 0)}"
        if entry.exit_code == 0:
            entry.state = "finished"
        elif self._status is not None:
            entry.state = "stopped"
        elif entry.restarts < self._max_restarts:
            entry.state = "restarting"
            process.restart_at = time.monotonic() + _PAUSE
            last = "".join(f' Its last line: "{line}"' for line in process.last_lines(1))
            self._tell(f"{how}; restart {entry.restarts + 1} of {self._max_restarts}.{last}")
        else:
            entry.state = "failed"
            self.failed = process
            self._stop(1)
            self._tell(f"{how} and is not restarted again: the run ends.")

    def _stop(self, status: int) -> None:
        """Ask all workers to end; `_press` sees to it that they do."""
        if self._status is not None:
            return
        self._status = status
        self._stopping_since = time.monotonic()
        Run(self.directory).stop()
        for process in self._processes:
            if process.entry.state == "restarting":
                process.entry.state = "stopped"

    def _press(self) -> None:
        if self._status is None:
            return
        waited = time.monotonic() - self._stopping_since
        while self._pressure and waited >= self._pressure[0][0]:
            _, number = self._pressure.pop(0)
            for process in self._processes:
                process.kill() if number == signal.SIGKILL else process.send(number)

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Note the signals that come, for `_hear`."""

        def note(number: int, _: FrameType | None) -> None:
            self._heard.append(number)

        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        numbers = [n for n in _SIGNALS if not (n == signal.SIGHUP and ignored)]
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self) -> None:
        while self._heard:
            number = self._heard.pop(0)
            if self._status is None:
                self._stop(128 + number)
                end = "the workers end" if self.ps else "the workers end, the center is saved"
                self._tell(f"Stopping: {end}. Ctrl-C again kills.")
            elif number != signal.SIGHUP:  # a terminal that closes may send several
                self._pressure = [(0.0, signal.SIGKILL)]

    def _keep_center(self) -> None:
        try:
            self.center = self._keeper.finish()
        except (CenterError, OSError) as error:
            self._status = self._status or 1
            self._tell(
                f"The center could not be saved: {error} It is still in memory: "
                f"`springline export {self.directory} PATH` writes it elsewhere."
            )

    def _record(self) -> None:
        """Write `RUN/launch.json` if anything has changed."""
        self._state.checkpoint = self._keeper.saved
        now = asdict(self._state)
        if now != self._written:
            self._written = now
            try:
                self._state.write(self.directory)
            except OSError as error:
                self._tell(f"Could not write {self.directory / NAME}: {error.strerror}.")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, SystemExit):  # whoever listened is gone; we go on
            self._say(text)

    def _number(self, workers: int | None) -> int:
        configured = self._place.configured_workers()
        if workers is None:
            return configured or max(2, cores())
        if configured not in (None, workers):
            raise LaunchError(
                f"The run in {self.directory} has {configured} workers, for good. Received: "
                f"--workers {workers}. Leave it out, or start a new run."
            )
        return workers


def _check(script: Path, workers: int | None, ps: int | None, max_restarts: int) -> None:
    if sys.platform != "linux":
        raise LaunchError(f"`springline run` needs Linux; this is {sys.platform}.")
    if script.is_dir():
        raise LaunchError(f"The script must be a Python file. Received: {script}, a directory.")
    if not script.exists():
        raise LaunchError(f"There is no script {script}.")
    if not os.access(script, os.R_OK):
        raise LaunchError(f"The script {script} cannot be read. May you?")
    if workers is not None and workers < 1:
        raise LaunchError(f"`--workers` must be an integer >= 1. Received: {workers}.")
    if ps is not None and ps < 0:
        raise LaunchError(f"`--ps` must be an integer >= 0. Received: {ps}.")
    if max_restarts < 0:
        raise LaunchError(f"`--max-restarts` must be an integer >= 0. Received: {max_restarts}.")
