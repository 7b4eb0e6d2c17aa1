"""Starts the workers of a run, watches them, restarts those that die, and saves the center."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from springline.center import CenterError
from springline.launch.backend import choose_backend
from springline.launch.directory import RunDirectory
from springline.launch.keeper import LostError
from springline.launch.process import AT_ONCE, WITHOUT_PS, Pressure, Task
from springline.launch.program import Program, check_same
from springline.launch.request import ClusterRequest, RestartPolicy, check_numbers
from springline.launch_state import NAME, LaunchState
from springline.mistakes import MISTAKE
from springline.run import REPORT, Run
from springline.signals import noted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask a launcher to stop
_LOOK = 0.05  # seconds between two looks at the workers
_PAUSE = 0.3  # seconds before a dead worker is restarted: the screen shows that


class Launcher:
    """One run. The constructor claims its directory, `run` does the rest.

    Args:
        program: what every worker runs.
        workers: how many; by default as many as the run in the directory has, else one per core
            and at least two.
        ps: how many parameter servers of a TensorFlow cluster to start beside them, which then
            hold the center; by default as many as the run in the directory has, else none.
        directory: the run's; None for a new one in `runs/`.
        cluster: what is asked of a Ray cluster; without an address, nothing.
        restarts: how often each worker that dies is restarted.
        start_from: a safetensors file whose values the center of a new run begins with.
        confirm: asks whether to go on, given a sentence, with another program than the run had.
        say: prints what happens to workers.

    Raises:
        LaunchError: the run cannot start; nothing was done.
    """

    def __init__(
        self,
        program: Program,
        *,
        workers: int | None = None,
        ps: int | None = None,
        directory: Path | None = None,
        cluster: ClusterRequest | None = None,
        restarts: RestartPolicy | None = None,
        start_from: Path | None = None,
        confirm: Callable[[str], bool] = lambda _: False,
        say: Callable[[str], None] = print,
    ) -> None:
        self._restarts = restarts or RestartPolicy()
        program.check()
        self._restarts.check()
        check_numbers(workers, ps)
        self._claim = RunDirectory(directory)
        self._began_in = self._claim.path
        self.continues = self._claim.continues
        self._say = say
        what = program, workers, ps, cluster or ClusterRequest(), start_from
        try:
            check_same(program, self._claim.path, confirm)
            self._backend, asked = choose_backend(self._claim, *what, self._tell)
            self._claim.make_private()
        except BaseException:
            self._claim.abandon()
            raise
        self._processes, self._servers = self._backend.workers, self._backend.servers
        self.workers, self.ps = len(self._processes), len(self._servers)
        self.address = asked.address
        self.center_name = self._backend.center_name
        self.resumable = self._backend.resumable
        self.center: Path | None = None  # where it is, at the end
        self.lost = False  # whether a center could not be kept whole
        self.failed: Task | None = None  # the one that ended the run
        self._state = LaunchState(
            program.identity,
            list(program.arguments),
            time.time(),
            os.getpid(),
            [process.entry for process in self._processes],
            ps=[server.entry for server in self._servers],
            cluster=asked if asked.address else None,
            center=self.center_name,
        )
        self._state.go_on(self.directory)
        self._written: dict[str, Any] = {}
        self._heard: list[int] = []  # signals that have come
        self._status: int | None = None  # set when the run is to stop early
        self._pressure: Pressure | None = None  # that makes workers end

    def run(self, tick: Callable[[], None] = lambda: None) -> int:
        """Start the workers and stay until all have ended. For the main thread, once.

        Args:
            tick: called several times a second.

        Returns:
            The exit status: 0 if every worker finished, 1 if one failed for good, 128 + its number
            if a signal ended the run.
        """
        with noted(*_SIGNALS) as self._heard:
            try:
                self._backend.begin()
                self._record()  # with the center's name, before it is made
                (self.directory / REPORT).unlink(missing_ok=True)  # of an earlier launch
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
                self._backend.release()
                self._claim.release()
        return self._status or 0

    @property
    def directory(self) -> Path:
        """The run's directory, also after it was moved."""
        return self._claim.path

    @property
    def version(self) -> int | None:
        """The version of the final center."""
        return self._backend.keeper.version

    def _watch(self, tick: Callable[[], None]) -> None:
        while self._going():
            self._hear()
            self._look_for_directory()
            for server in self._servers:
                self._look_at_server(server)
            for process in self._processes:
                self._look(process)
                if text := process.newly_stopped():
                    self._tell(text)
                for text in process.new_warnings():
                    self._tell(f"{process.name.capitalize()}: {text}")
            if self._pressure:
                self._pressure.apply(self._processes)
            self._backend.tick()
            self._record()
            tick()
            time.sleep(_LOOK)

    def _going(self) -> bool:
        return any(p.alive or p.entry.state == "restarting" for p in self._processes)

    def _look_for_directory(self) -> None:
        """End a run whose directory was moved: its workers have the old path."""
        if self._status is None and self.directory != self._began_in:
            self._stop(1)
            self._tell(
                f"The run's directory was moved from {self._began_in} to {self.directory} while "
                "the run was going on, and its workers do not know: the run ends."
            )

    def _look(self, process: Task) -> None:
        """Handle a worker's end; restart it after its pause."""
        entry = process.entry
        if process.look():
            self._ended(process)
        elif entry.state == "restarting" and time.monotonic() >= process.restart_at:
            entry.restarts += 1
            process.start()

    def _look_at_server(self, server: Task) -> None:
        """Handle a parameter server's end, which ends the run: its part of the center is gone."""
        if not server.look():
            return
        if self._status is not None:
            server.entry.state = "stopped"
            return
        server.entry.state, self.failed = "failed", server
        self._stop(1)
        self._pressure = Pressure(WITHOUT_PS)
        how = f"{server.name.capitalize()} {server.describe_end()}"
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

    def _ended(self, process: Task) -> None:
        entry = process.entry
        how = f"{process.name.capitalize()} {process.describe_end()}"
        self._backend.gone(process)
        if self._status is not None:
            entry.state = "stopped"
        elif entry.exit_code == 0:
            entry.state = "finished"
        elif entry.exit_code == MISTAKE:
            self._fail(process, f"{how}, after an error that no restart fixes: the run ends.")
        elif why := self._backend.hopeless():
            self._fail(process, f"{how}. {why}: the run ends.")
        elif which := self._restarts.next(process.name):
            entry.state = "restarting"
            process.restart_at = time.monotonic() + _PAUSE
            words = process.last_words()
            last = f' Its last line: "{words}"' if words else ""
            self._tell(f"{how}; restart {which}.{last}")
        else:
            self._fail(process, f"{how} and is not restarted again: the run ends.")
        if entry.state != "restarting":
            process.release()

    def _fail(self, process: Task, text: str) -> None:
        """End the run with a worker that is not restarted."""
        process.entry.state, self.failed = "failed", process
        self._stop(1)
        self._tell(text)

    def _stop(self, status: int) -> None:
        """Ask all workers to end; `_watch` enforces it."""
        if self._status is not None:
            return
        self._status = status
        self._pressure = Pressure()
        Run(self.directory).stop()
        for process in self._processes:
            if process.entry.state == "restarting":
                process.entry.state = "stopped"
                process.release()

    def _hear(self) -> None:
        while self._heard:
            number = self._heard.pop(0)
            if self._status is None:
                self._stop(128 + number)
                end = "the workers end" if self.ps else "the workers end, the center is saved"
                self._tell(f"Stopping: {end}. Ctrl-C again kills.")
            elif number != signal.SIGHUP:  # a terminal that closes may send several
                self._pressure = Pressure(AT_ONCE)

    def _keep_center(self) -> None:
        try:
            self._heard.clear()
            self.lost = not self._backend.finish_others()
            self.center = self._backend.finish(lambda: bool(self._heard))
        except (CenterError, OSError) as error:
            self.lost = True
            could_not = f"The center could not be saved: {error} {self._backend.rescue}"
            self._tell(str(error) if isinstance(error, LostError) else could_not)
        if self.lost:
            self._status = self._status or 1

    def _record(self) -> None:
        """Write `RUN/launch.json` if anything has changed."""
        self._state.checkpoint = self._backend.keeper.saved
        now = asdict(self._state)
        if now != self._written:
            self._written = now
            try:
                self._state.write(self.directory)
            except OSError as error:
                self._tell(f"Could not write {self.directory / NAME}: {error.strerror}.")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, SystemExit):  # stdout is closed; the run continues
            self._say(text)
