"""One worker of a run on another machine: the launcher's end of its `Host`."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from springline.launch.directory import CENTER
from springline.launch.fetch import Fetched
from springline.launch.host import Assignment, Begun, Host, News
from springline.launch.state import CenterStatus
from springline.launch.task import Task
from springline.run import Run

_EVERY = 0.2  # seconds between two questions to a host, of a few
_EACH = 0.002  # seconds, at least, between two questions to hosts, of many
_log = logging.getLogger("springline")
_PATIENCE = 5.0  # seconds after which a host that was told to kill its worker is killed itself


class RemoteWorker(Task):
    """One rank of a run on a cluster, over all its lives.

    Args:
        assignment: what its host is to do.
        directory: the run's.
        options: of the host, as an actor.
    """

    def __init__(self, assignment: Assignment, directory: Path, options: Mapping[str, Any]) -> None:
        super().__init__(directory, assignment.rank)
        self._assignment = assignment
        self._directory = directory
        self._options = dict(options)
        self._every = max(_EVERY, _EACH * assignment.workers)
        self._fetched = Fetched(directory, assignment.rank)
        self._host: Any = None
        self._asked: Any = None  # what has been asked and not been answered
        self._ask_at = 0.0
        self._alive = False
        self._begun = False
        self._life = 0
        self._kill_at: float | None = None
        self._lost = ""
        self._last: tuple[str, tuple[Any, ...]] = ("", ())  # what was asked last
        self.since = 0.0  # when it was to start
        self.closing: Any = None  # its host's last answer

    @property
    def alive(self) -> bool:
        """Whether it runs, or is about to, as far as `look` has seen."""
        return self._alive

    @property
    def waits(self) -> float:
        """For how long it has been about to start."""
        return time.monotonic() - self.since if self._alive and not self._begun else 0.0

    def start(self) -> None:
        """Let its host start it; find it another if the last one was lost."""
        self._begun, self._kill_at, self._lost = False, None, ""
        self._life += 1
        self.since = time.monotonic()
        self.entry.state, self.entry.exit_code, self.entry.pid = "starting", None, None
        if self._host is None:
            self._fetched = Fetched(self._directory, self.entry.rank)
            self._host = ray.remote(Host).options(**self._options).remote(self._assignment)
        self._alive = True  # now that there is somebody to ask
        starts = [*self.entry.starts]
        self.entry.starts.append(time.time())
        made = CenterStatus.read(self._directory / CENTER) is not None
        self._ask("begin", self._life, starts, made)

    def look(self) -> bool:
        """Return whether it has ended since the last look; its entry then has the exit code.

        What it has printed and logged is in the run's directory by then, unless it was lost with
        its machine.
        """
        if not self._alive:
            return False
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            return self._lose("did not end")
        if self._asked is None:
            if time.monotonic() >= self._ask_at:
                self._ask_for_news()
            return False
        if not ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked = self._asked, None
        try:
            answer = ray.get(asked)
        except ActorUnavailableError:  # for now: ask again
            self._ask_again()
            return False
        except RayError as error:
            return self._lose(_reason(error))
        return self._hear_begun(answer) if isinstance(answer, Begun) else self._hear(answer)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if not self._alive:
            return
        if self._begun:
            self._host.send.remote(int(number))
        else:
            self.kill()  # there is no process yet

    def kill(self) -> None:
        """Kill it and all that it has started; its host as well, if that does not answer."""
        if not self._alive:
            return
        if self._begun:
            self._host.kill.remote()
        else:
            ray.kill(self._host)
        self._kill_at = self._kill_at or time.monotonic() + _PATIENCE

    def release(self) -> None:
        """Let its host clean up and go."""
        if self._host is not None:
            self.closing = self._host.close.remote()
            self._host = None  # it ends when it has answered, for nobody else knows it

    def describe_end(self) -> str:
        """Say how it ended."""
        if self.entry.exit_code is not None:
            return super().describe_end()
        return f"was lost{f' on {self.entry.machine}' if self.entry.machine else ''}: {self._lost}"

    def last_words(self) -> str:
        """Return its last line; nothing if the script was not started in this life."""
        return super().last_words() if self._begun else ""

    def _ask(self, method: str, *arguments: Any) -> None:
        self._last = method, arguments
        self._asked = getattr(self._host, method).remote(*arguments)

    def _ask_again(self) -> None:
        method, arguments = self._last
        self._ask(method, *arguments)

    def _ask_for_news(self) -> None:
        stopping = Run(self._directory).stopping()
        self._ask("news", self._fetched.have, stopping)

    def _hear_begun(self, begun: Begun) -> bool:
        self.entry.machine = begun.machine
        if begun.refused and self._life > 1:  # what was there before may be back soon
            return self._lose(begun.refused.rstrip("."))
        if begun.refused:
            self.refused = begun.refused
            self._alive = False
            return True
        self._begun = True
        self.entry.pid, self.entry.state = begun.pid, "running"
        return False

    def _hear(self, news: News) -> bool:
        fetched = self._take(news)
        if self._kill_at is not None:
            self._kill_at = time.monotonic() + _PATIENCE  # it answers
            if not news.ended:
                self._host.kill.remote()  # the first one may have been lost
        if news.stopping and not Run(self._directory).stopping():
            Run(self._directory).stop()
        if news.ended and not (fetched and news.pieces):
            self.entry.exit_code, self.entry.pid, self._alive = news.code, None, False
            return True
        pause = 0.0 if news.ended or any(not p.last for p in news.pieces) else self._every
        self._ask_at = time.monotonic() + pause
        return False

    def _take(self, news: News) -> bool:
        """Write what has come to the run's directory; return whether that was possible."""
        try:
            for piece in news.pieces:
                self._fetched.take(piece)
        except OSError as error:
            _log.warning("Cannot write what %s has printed and logged: %s", self.name, error)
            return False
        return True

    def _lose(self, reason: str) -> bool:
        with contextlib.suppress(RayError):
            ray.kill(self._host)
        self._host = self._asked = None
        self._alive, self._lost = False, reason
        self.entry.pid = None
        return True


def _reason(error: Exception) -> str:
    """Return why a host is gone, in Ray's words: the last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
