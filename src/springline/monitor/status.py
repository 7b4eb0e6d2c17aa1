"""The state of a run at one moment, read from its directory.

What is read: `launch.json` (what the launcher knows), the center's counters in shared memory, or
its checkpoint when the memory is gone, or what the launcher writes down of a center on a cluster,
and the ends of the metrics. Each may be missing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from springline.center import CenterError
from springline.center.shared import CHECKPOINT_NAME
from springline.files import open_regular
from springline.launch.directory import is_held
from springline.launch_state import NAME as LAUNCH_NAME
from springline.launch_state import LaunchState, WorkerEntry, WorkerState
from springline.monitor.metrics import FOLDER, Evaluation
from springline.monitor.sources import CenterReader, CenterState, RankReader
from springline.typed import Count, convert

# "left" is a worker that is no member of its center any more, and no launcher reports why. It is
# "unknown" if the center is on every rank and no launcher has started them.
State = WorkerState | Literal["left", "unknown"]
_DIGITS = 20  # of a number of steps, at most


class NotARunError(CenterError, ValueError):
    """A directory is not a run's."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker. Counts include earlier incarnations of its rank."""

    rank: int
    state: State
    step: int = 0
    rate: float | None = None  # steps per second over the last few seconds, while it runs
    loss: float | None = None  # the last one; NaN if it was not finite
    exchanges: int | None = 0  # None if they are not counted
    milliseconds: float | None = None  # per exchange, over the last few seconds
    restarts: int = 0
    distance: float | None = None  # from the center at its last exchange, ‖x − c‖/‖c‖


@dataclass(frozen=True)
class Status:
    """A run. What is not known yet is None, empty or 0."""

    directory: Path
    workers: tuple[WorkerStatus, ...]
    settings: dict[str, Any]  # the center's: rule, period, workers, ...
    version: int | None  # the center's
    bytes_exchanged: int
    elapsed: float  # seconds, without the pauses between two launches
    checkpoint_age: float | None  # seconds
    total: int | None  # steps that each worker is to make
    over: bool
    ps: int = 0  # parameter servers, which hold the center of a TensorFlow run
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # the last, by name
    left_out: int = 0  # parts that exchanges were made without, since they stayed locked
    on_cluster: bool = False  # its center, whose shards keep checkpoints of their own
    bad_lines: int = 0  # of the metrics, which were skipped
    outer_rate: float | None = None  # the outer learning rate of the last exchange


class StatusReader:
    """Polls the state of a run, at little cost."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._center = CenterReader(self.directory / "center")
        self._ranks: dict[int, RankReader] = {}
        self._joined: dict[int, float] = {}  # when those that it saw as members were started

    def read(self) -> Status:
        """Read the state now."""
        launch = LaunchState.read(self.directory)
        center = self._center.read()
        if launch is None and center.plan is None and not (self.directory / FOLDER).is_dir():
            raise NotARunError(
                f"{self.directory} is not a run: it has no {LAUNCH_NAME}, no center and no "
                "metrics. Give the directory that `springline run` named."
            )
        now = time.time()
        launched = launch is not None and launch.ended is None and is_held(self.directory)
        over = not (launched or center.members)
        workers = tuple(
            self._worker(rank, launch, launched, center, now)
            for rank in range(self._count(launch, center))
        )
        firsts = [rank.first for rank in self._ranks.values() if rank.first]
        lasts = [rank.last for rank in self._ranks.values() if rank.last]
        started = launch.started if launch else min(firsts, default=now)
        ended = (launch and launch.ended) or max(lasts, default=started)
        before = launch.seconds_before if launch else 0.0
        saved = self._saved(launch)
        return Status(
            directory=self.directory,
            workers=workers,
            settings=center.plan.settings if center.plan else {},
            version=center.version,
            bytes_exchanged=center.bytes_exchanged,
            elapsed=before + max(0.0, (ended if over else now) - started),
            checkpoint_age=None if saved is None else max(0.0, now - saved),
            total=self._total(launch),
            over=over,
            ps=len(launch.ps) if launch else 0,
            evaluations=self._evaluations(),
            left_out=center.left_out,
            on_cluster=bool(launch and launch.cluster),
            bad_lines=sum(rank.bad_lines for rank in self._ranks.values()),
            outer_rate=self._outer_rate(),
        )

    def close(self) -> None:
        """Let go of the center."""
        self._center.close()

    def _count(self, launch: LaunchState | None, center: CenterState) -> int:
        if launch and launch.workers:
            return len(launch.workers)
        if center.plan:
            return center.plan.workers
        names = [path.stem for path in (self.directory / FOLDER).glob("rank-*.jsonl")]
        ranks = [name.removeprefix("rank-") for name in names]
        return max((int(rank) + 1 for rank in ranks if rank.isdecimal()), default=0)

    def _worker(
        self, k: int, launch: LaunchState | None, launched: bool, center: CenterState, now: float
    ) -> WorkerStatus:
        path = self.directory / FOLDER / f"rank-{k}.jsonl"
        rank = self._ranks.setdefault(k, RankReader(path))
        done = center.progress[k] if k < len(center.progress) else None
        rank.read(done, now, launch.started if launch else 0.0)
        entry = next((e for e in launch.workers if e.rank == k), None) if launch else None
        # Of a TensorFlow cluster it is not known who is a member.
        member = k in center.members or bool(launched and launch and launch.ps)
        began = entry.starts[-1] if entry and entry.starts else 0.0
        if member:
            self._joined[k] = began
        state = _state(entry, launched, member, rank, self._joined.get(k) == began)
        unreported = launch is None and center.plan is None
        counted = None if unreported else 0
        return WorkerStatus(
            rank=k,
            state="unknown" if unreported else state,
            step=rank.step,
            rate=rank.steps.rate(now) if state == "running" else None,
            loss=rank.loss,
            exchanges=done.exchanges if done else counted,
            milliseconds=rank.milliseconds,
            restarts=entry.restarts if entry else 0,
            distance=rank.distance,
        )

    def _evaluations(self) -> dict[str, Evaluation]:
        last: dict[str, Evaluation] = {}
        for rank in self._ranks.values():
            for name, found in rank.evaluations.items():
                if name not in last or found.time > last[name].time:
                    last[name] = found
        return last

    def _outer_rate(self) -> float | None:
        found = [rank.outer_rate for rank in self._ranks.values() if rank.outer_rate]
        return max(found, key=lambda rate: rate.time).value if found else None

    def _saved(self, launch: LaunchState | None) -> float | None:
        times = [launch.checkpoint] if launch and launch.checkpoint else []
        path = self.directory / "center" / CHECKPOINT_NAME
        if path.exists():
            times.append(path.stat().st_mtime)
        return max(times, default=None)

    def _total(self, launch: LaunchState | None) -> int | None:
        path = self.directory / "total"
        try:
            if launch and path.stat().st_mtime < launch.started:  # of an earlier start here
                return None
            with open_regular(path) as file:
                return int(convert(Count, int(file.read(_DIGITS)), "total"))
        except (OSError, ValueError):
            return None


def _state(
    entry: WorkerEntry | None, launched: bool, member: bool, rank: RankReader, joined: bool
) -> State:
    if entry and (launched or entry.state in ("finished", "failed", "stopped")):
        if entry.state == "running" and not (joined or _has_begun(entry, rank)):
            return "starting"
        return entry.state
    if member:
        return "running"
    return "left" if entry or rank.step else "starting"


def _has_begun(entry: WorkerEntry, rank: RankReader) -> bool:
    """Whether a process that is no member of the center has been one, for all that is known."""
    start = entry.starts[-1] if entry.starts else 0.0
    return rank.step > 0 and (rank.last is None or rank.last >= start)
