"""One worker of a run on a Ray cluster: the launcher's end of its actor.

An actor runs the script on its machine, across restarts; where the actor dies, the next start
creates another, wherever Ray has room. The launcher polls it with one idempotent call: each start
has a number, and the call carries how much of the worker's files the launcher has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from springline.files import write_text
from springline.launch.directory import CENTER
from springline.launch.process import Task
from springline.launch.worker_actor import (
    Assignment,
    FilePart,
    News,
    Start,
    Version,
    WorkerActor,
)
from springline.launch_state import CenterStatus
from springline.run import Run

_log = logging.getLogger("springline")
_AGAIN = 0.5  # seconds before an actor that is unavailable is polled again
_PATIENCE = 5.0  # seconds without an answer after which a killed worker's actor is killed, too


class RayWorker(Task):
    """One rank of a run on a cluster, over all its starts."""

    def __init__(self, assignment: Assignment, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__(directory, assignment.rank)
        self._assignment = assignment
        self._directory = directory
        self._options = dict(options)
        self._actor: Any = None
        self._asked: Any = None  # the answer to come
        self._ask_at = 0.0
        self._met = False  # whether an actor has ever answered
        self._have: dict[str, Version] = {}  # what we have of each file
        self._start = Start(0, [], False)
        self._alive = self._begun = self._killed = False
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
            make = ray.remote(WorkerActor).options(**self._options)
            self._actor, self._have = make.remote(self._assignment), {}
        made = CenterStatus.read(self._directory / CENTER) is not None
        self._start = Start(self._start.number + 1, [*self.entry.starts], made)
        self._alive, self._begun, self._killed, self._away = True, False, False, ""
        self._asked, self._ask_at, self._heard = None, 0.0, time.monotonic()
        self.entry.state, self.entry.exit_code, self.entry.pid = "starting", None, None
        self.entry.starts.append(time.time())

    def look(self) -> bool:
        """Return whether it has ended since the last look; its entry then has the exit code.

        What it has printed and logged is in the run's directory by then, unless it was lost with
        its machine.
        """
        if not self._alive:
            return False
        if self._killed and (not self._begun or self.waits > _PATIENCE):
            return self._lose("it did not end")
        if self._asked is None:
            if time.monotonic() >= self._ask_at:
                start = None if self._begun else self._start
                stopping = Run(self._directory).stopping()
                self._asked = self._actor.look.remote(start, self._have, stopping)
            return False
        if not ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked = self._asked, None
        try:
            return self._hear(ray.get(asked))
        except ActorUnavailableError:  # it may answer again
            self._ask_at = time.monotonic() + _AGAIN
            return False
        except RayError as error:
            if not self._met:
                return self._refuse(f"{self.name.capitalize()} cannot start: {_last_line(error)}.")
            return self._lose("its actor or its machine died")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._alive and self._begun:
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

    def last_words(self) -> str:
        """Return its last line; nothing if the script was not started this time."""
        return super().last_words() if self._begun else ""

    def _hear(self, news: News) -> bool:
        self._heard, self._met, self.entry.machine = time.monotonic(), True, news.machine
        if news.refused:
            return self._refuse(news.refused)
        if not self._begun:
            self._begun, self.entry.pid, self.entry.state = True, news.pid, "running"
        for part in news.parts:
            self._write(part)
        if news.stopping:
            Run(self._directory).stop()
        if news.ended:
            if news.left:
                _log.warning("%s has left files in %s.", self.name.capitalize(), news.left)
            return self._end(news.code)
        if self._killed:
            self.kill()  # the first one may have been lost
        return False

    def _end(self, code: int | None) -> bool:
        self.entry.exit_code, self.entry.pid, self._alive = code, None, False
        return True

    def _refuse(self, reason: str) -> bool:
        self.refused = reason
        return self._end(None)

    def _lose(self, reason: str) -> bool:
        """Kill the actor; the next start creates another."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        self._actor = self._asked = None
        self._away = reason
        return self._end(None)

    def _write(self, part: FilePart) -> None:
        """Write new bytes of a file; what cannot be written is skipped with a warning."""
        self._have[part.name] = part.version
        path = self._directory / part.name
        if part.name not in self._assignment.files:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if part.name not in self._assignment.growing:
                write_text(path, part.data)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND
                with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                    file.write(part.data)
        except OSError as error:
            _log.warning("Some of what %s has written is lost: %s", self.name, error)


def _last_line(error: Exception) -> str:
    """Return the last line of Ray's error that is not empty: why the actor is gone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
