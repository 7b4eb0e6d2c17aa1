"""Where the state of a run is polled: the center and the ranks' metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from springline.center import CenterError, Progress, SharedCenter
from springline.center.checkpoint import describe, newest
from springline.center.directory import LAYOUT_NAME, read_layout
from springline.center.plan import BASE, Plan
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import is_held
from springline.launch_state import CenterStatus
from springline.monitor.metrics import (
    Evaluation,
    Line,
    LineReader,
    is_center,
    open_metrics,
    training_loss,
)
from springline.progress import DISTANCE, OUTER_RATE

_WINDOW = 5.0  # seconds over which speeds are measured
_STALLED = 2.0  # seconds without a change, where changes used to come faster
_TAIL = 1 << 20  # bytes of a rank's metrics that are read at first


def find_plan(center: Path) -> Plan | None:
    """Read what a center is, or was, on this machine or on a cluster; None if there is none yet."""
    found = read_layout(center)
    if found:
        return found[0]
    status = CenterStatus.read(center)
    return status.plan if status else None


@dataclass(frozen=True)
class CenterState:
    """What is known of a center: nothing, or at least its plan."""

    plan: Plan | None = None
    version: int | None = None
    progress: tuple[Progress, ...] = ()
    members: tuple[int, ...] = ()
    left_out: int = 0  # parts that exchanges were made without, since they stayed locked

    @property
    def bytes_exchanged(self) -> int:
        """To the center and back, by all workers."""
        if self.plan is None:
            return 0
        # A synchronous center's version counts rounds, any other's exchanges.
        rounds = self.plan.rounds
        done = sum(rank.exchanges for rank in self.progress) if rounds else self.version or 0
        return 2 * self.plan.layout.nbytes * done // self.plan.layout.fragments


class CenterReader:
    """Reads a center's counters, from its memory or, when that is gone, its checkpoint.

    The center stays open between two reads, until its memory is another one. Of a center on a
    cluster it reads the status that the launcher writes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: tuple[int, int] | None = None  # the layout.json that was read
        self._plan: Plan | None = None
        self._memory = directory
        self._center: SharedCenter | None = None
        self._last = CenterState()

    def read(self) -> CenterState:
        """Read the counters now."""
        self._look()
        if self._plan is None:
            self._last = self._reported()
        elif self._center is None:
            self._last = self._without_memory(self._plan)
        else:
            center = self._center
            progress = center.progress()
            if center.memory.head[BASE]:  # it began with a checkpoint, its counters did not
                progress = _at_least(progress, self._plan, center.version)
            self._last = CenterState(
                self._plan,
                center.version,
                tuple(progress),
                tuple(center.members()),
                center.left_out,
            )
        return self._last

    def close(self) -> None:
        """Let go of the center."""
        if self._center:
            self._center.close()
        self._center = None

    def _look(self) -> None:
        try:
            status = (self.directory / LAYOUT_NAME).lstat()
            known = status.st_ino, status.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            known = None
        if known != self._known:
            self.close()
            self._plan, self._memory = read_layout(self.directory) or (None, self.directory)
            self._known = known
        if self._plan is None or not self._memory.is_file():
            self.close()
        elif self._center is None:
            try:
                self._center = SharedCenter.open(self.directory)
            except (CenterError, OSError):  # its memory went away this very moment
                self._known = None

    def _reported(self) -> CenterState:
        """Return what the launcher has written; members only while it is alive."""
        status = CenterStatus.read(self.directory)
        if status is None:
            return CenterState()
        progress = tuple(Progress(*rank) for rank in status.progress)
        members = tuple(status.members) if is_held(self.directory.parent) else ()
        return CenterState(status.plan, status.version, progress, members)

    def _without_memory(self, plan: Plan) -> CenterState:
        """Return what was seen last, or what the checkpoint holds."""
        saved = newest(self.directory / CHECKPOINT_NAME, whole=False)
        if saved is None:
            return replace(self._last, plan=plan, members=())
        found = describe(saved)
        if self._last.version is not None and self._last.version >= found.version:
            return replace(self._last, members=())
        done = [Progress(n, 0, 0.0) for n in found.steps]
        return CenterState(plan, found.version, tuple(_at_least(done, plan, found.version)))


class Recent:
    """The last changes of a counter: those of the last seconds, and never fewer than two.

    >>> steps = Recent()
    >>> for second in range(20):
    ...     steps.add(second, 10 * second)
    >>> steps.rate(now=19.5), steps.rate(now=30)
    (10.0, 0.0)
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int, float]] = deque()

    def add(self, time: float, count: int, amount: float = 0.0) -> None:
        """Note a counter, and an amount that grows with it. One that goes back starts over."""
        changes = self._changes
        if changes and count < changes[-1][1]:
            changes.clear()
        if not changes or count > changes[-1][1]:
            changes.append((time, count, amount))
        while len(changes) > 2 and changes[0][0] < changes[-1][0] - _WINDOW:
            changes.popleft()

    def clear(self) -> None:
        """Forget all."""
        self._changes.clear()

    def rate(self, now: float) -> float | None:
        """Return the growth per second: 0 if it has come to a halt by `now`, None if unknown."""
        if len(self._changes) < 2:
            return None
        (start, first, _), (end, last, _) = self._changes[0], self._changes[-1]
        interval = (end - start) / (len(self._changes) - 1)
        if now - end > max(_STALLED, 3 * interval):
            return 0.0
        return (last - first) / (end - start) if end > start else None

    def amount_per_count(self) -> float | None:
        """Return how much of the amount there was to each count; None if nothing was counted."""
        if not self._changes:
            return None
        _, last, total = self._changes[-1]
        _, first, before = self._changes[0] if len(self._changes) > 1 else (0.0, 0, 0.0)
        return (total - before) / (last - first) if last > first else None


class RankReader:
    """Reads how far one rank has come, from its metrics."""

    def __init__(self, path: Path) -> None:
        self._reader = LineReader(path, tail=_TAIL)
        self._path = path
        self._losses: dict[str, float] = {}
        self.evaluations: dict[str, Evaluation] = {}  # the last, by name
        self._exchanges = Recent()
        self._logged = 0
        self.distance: float | None = None  # from the center, at the last exchange that it logged
        self.outer_rate: Evaluation | None = None  # of that exchange
        self.steps = Recent()
        self.step = 0
        self.first: float | None = None  # when it logged first and last
        self.last: float | None = None

    @property
    def bad_lines(self) -> int:
        """How many lines were skipped."""
        return self._reader.bad

    @property
    def loss(self) -> float | None:
        """The last one; NaN if it was not finite."""
        name = training_loss(self._losses)
        return None if name is None else self._losses[name]

    @property
    def milliseconds(self) -> float | None:
        """Per exchange, over the last few seconds."""
        seconds = self._exchanges.amount_per_count()
        return None if seconds is None else 1e3 * seconds

    def read(self, done: Progress | None, now: float, started: float) -> None:
        """Take what the center knows of the rank and what was logged since the last time.

        What was logged before `started`, by an earlier launch, says nothing about the speed now.
        """
        for line in self._reader.read():
            if self.first is None:
                self.first = _first_time(self._path) or line.time
            if not line.values:
                self.steps.clear()
            if line.time >= started:
                self.steps.add(line.time, line.step)
            self.last, self._logged = line.time, line.step
            self.distance = line.values.get(DISTANCE, self.distance)
            if OUTER_RATE in line.values:
                self.outer_rate = Evaluation(line.time, line.step, line.values[OUTER_RATE])
            self._losses |= {k: v for k, v in line.values.items() if k.endswith("loss")}
            self.evaluations |= {
                name: Evaluation(line.time, line.step, value)
                for name, value in line.values.items()
                if is_center(name)
            }
        self.step = self._logged
        if done and done.steps > self.step:
            self.step = done.steps
            self.steps.add(now, done.steps)
        if done and done.seconds:
            self._exchanges.add(now, done.exchanges, done.seconds)


def _first_time(path: Path) -> float | None:
    with open_metrics(path) as file:
        line = Line.parse(file.readline())
    return line.time if line else None


def gap_of(plan: Plan) -> int | None:
    """Return the local steps between two exchanges; None if they follow a schedule."""
    period = plan.settings["period"]
    return None if isinstance(period, str) else max(1, period // plan.layout.fragments)


def _at_least(ranks: Sequence[Progress], plan: Plan, version: int) -> list[Progress]:
    """Count the exchanges before a checkpoint by the steps and the version that it knows."""
    gap, total = gap_of(plan), sum(rank.steps for rank in ranks)

    def exchanges(steps: int) -> int:
        if gap is not None or not total:
            return -(-steps // (gap or 1))
        return version * (steps > 0) if plan.rounds else round(version * steps / total)

    return [replace(r, exchanges=max(r.exchanges, exchanges(r.steps))) for r in ranks]
