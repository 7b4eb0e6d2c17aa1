"""What the launcher knows, for monitors of the run.

RUN/launch.json           of its workers
RUN/center/status.json    of a center on a cluster
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from springline.center.plan import Plan
from springline.sealed import read_json, reading, write_json
from springline.typed import Count, Seconds, build

NAME = "launch.json"
STATUS_NAME = "status.json"
_CENTER_NAME = re.compile(r"[^/\0]*-[0-9a-f]{8}\Z")  # as `center_name` draws them
_Made = TypeVar("_Made")
WorkerState = Literal["starting", "running", "restarting", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Asked:
    """What was asked of a Ray cluster; None where nothing was given.

    Args:
        address: the cluster's: `auto` or `HOST:PORT`. None for this machine alone.
        shards: into how many the center is cut.
        storage: where its shards keep checkpoints; `none` for nowhere.
        cpus: per worker.
        gpus: per worker.
        working_dir: a directory that is copied to every machine, from which the script is run.
        env: names of the launcher's environment variables that workers get.
    """

    address: str | None = None
    shards: int | None = None
    storage: str | None = None
    cpus: float | None = None
    gpus: float | None = None
    working_dir: str | None = None
    env: list[str] | None = None


@dataclass
class WorkerEntry:
    """One worker, or one parameter server."""

    rank: Count
    state: WorkerState = "starting"
    pid: Count | None = None
    restarts: Count = 0  # of this launch
    exit_code: int | None = None
    starts: list[Seconds] = field(default_factory=list)  # all of them, also earlier launches'
    machine: str | None = None  # the one of a cluster that it is on

    @property
    def is_over(self) -> bool:
        """Whether it is not restarted."""
        return self.state in ("finished", "failed", "stopped")


@dataclass
class LaunchState:
    """The run as its launcher sees it. Times are seconds since the epoch."""

    script: str
    arguments: list[str]
    started: Seconds
    pid: Count
    workers: list[WorkerEntry] = field(default_factory=list)
    checkpoint: Seconds | None = None  # when the center was last saved
    ended: Seconds | None = None
    earlier: list[tuple[Seconds, Seconds]] = field(default_factory=list)  # launches: start and end
    ps: list[WorkerEntry] = field(default_factory=list)  # the parameter servers, by number
    cluster: Asked | None = None  # what was asked of one, if the run is on one
    center: str | None = None  # what the center is called there

    @property
    def launches(self) -> list[float]:
        """When each launch in the directory began, the last one's as well."""
        return [*(start for start, _ in self.earlier), self.started]

    @property
    def seconds_before(self) -> float:
        """How long the earlier launches ran."""
        return sum(max(0.0, end - start) for start, end in self.earlier)

    def go_on(self, directory: Path) -> None:
        """Count on from an earlier launch in a directory, if there was one."""
        before = LaunchState.read(directory)
        if before is None:
            return
        end = before.ended or _last_sign(directory)
        self.earlier = [*before.earlier, (before.started, end)]
        starts = {worker.rank: worker.starts for worker in before.workers}
        for worker in self.workers:
            worker.starts = starts.get(worker.rank, [])
        for server, was in zip(self.ps, before.ps, strict=False):
            server.starts = was.starts

    def write(self, directory: Path) -> None:
        """Replace `RUN/launch.json`."""
        write_json(directory / NAME, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> LaunchState | None:
        """Read `RUN/launch.json`; None if the directory has none.

        Raises:
            DamagedError: what it has cannot be read.
        """

        def make(values: Any) -> LaunchState:
            state = build(cls, values)
            if state.center is not None and not _CENTER_NAME.match(state.center):
                raise ValueError(f"{state.center[:40]!r} is no name of a center")
            return state

        return _read(directory / NAME, make, "Remove it, and give the run's options again.")


@dataclass(frozen=True)
class CenterStatus:
    """What a center on a cluster reported."""

    plan: Plan
    version: int
    members: list[int]
    progress: list[tuple[int, int, float]]  # of each rank: steps, exchanges, seconds

    def write(self, directory: Path) -> None:
        """Replace `status.json` in the center's directory."""
        directory.mkdir(mode=0o700, exist_ok=True)
        write_json(directory / STATUS_NAME, {**vars(self), "plan": self.plan.to_json()})

    @classmethod
    def read(cls, directory: Path) -> CenterStatus | None:
        """Read it; None if there is none.

        Raises:
            DamagedError: what there is cannot be read.
        """

        def make(values: Any) -> CenterStatus:
            written = build(_Written, values)
            return cls(**{**vars(written), "plan": Plan.from_json(written.plan)})

        advice = "Remove it: the center's own storage has the same."
        return _read(directory / STATUS_NAME, make, advice)


@dataclass(frozen=True)
class _Written:
    """What `CenterStatus` writes."""

    plan: dict[str, Any]
    version: Count
    members: list[Count]
    progress: list[tuple[Count, Count, Seconds]]


def _read(path: Path, make: Callable[[Any], _Made], advice: str) -> _Made | None:
    """Make something of a JSON file; None if there is none."""
    try:
        with reading(path, advice):
            return make(read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _last_sign(directory: Path) -> float:
    """Return when a launch whose launcher was killed was last seen alive."""
    signs = [directory / NAME, *(directory / "metrics").glob("rank-*.jsonl")]
    return max(path.stat().st_mtime for path in signs)
