"""What the launcher knows, for whoever watches the run.

RUN/launch.json           of its workers
RUN/center/status.json    of a center on a cluster
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from springline.files import write_text

NAME = "launch.json"
STATUS_NAME = "status.json"
WorkerState = Literal["starting", "running", "restarting", "finished", "failed", "stopped"]


@dataclass
class WorkerEntry:
    """One worker, or one parameter server."""

    rank: int
    state: WorkerState = "starting"
    pid: int | None = None
    restarts: int = 0  # of this launch
    exit_code: int | None = None
    starts: list[float] = field(default_factory=list)  # of all its lives, also in earlier launches
    machine: str | None = None  # the one of a cluster that it is on

    @property
    def is_over(self) -> bool:
        """Whether it is not started again."""
        return self.state in ("finished", "failed", "stopped")


@dataclass
class LaunchState:
    """The run as its launcher sees it. Times are seconds since the epoch."""

    script: str
    arguments: list[str]
    started: float
    pid: int
    workers: list[WorkerEntry] = field(default_factory=list)
    checkpoint: float | None = None  # when the center was last saved
    ended: float | None = None
    earlier: list[tuple[float, float]] = field(default_factory=list)  # launches: start and end
    ps: list[WorkerEntry] = field(default_factory=list)  # the parameter servers, by number
    cluster: dict[str, Any] | None = None  # what was asked of one, if the run is on one
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
        """Count on from an earlier launch in a directory, if there was one that can be read."""
        before = LaunchState.last(directory)
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
        write_text(directory / NAME, json.dumps(asdict(self), indent=1))

    @classmethod
    def last(cls, directory: Path) -> LaunchState | None:
        """Return the last launch in a directory; None if there was none that can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return cls.read(directory)
        return None

    @classmethod
    def read(cls, directory: Path) -> LaunchState | None:
        """Read `RUN/launch.json`; None if the directory has none."""
        try:
            values = json.loads((directory / NAME).read_text("utf-8"))
        except FileNotFoundError:
            return None
        values["workers"] = [WorkerEntry(**entry) for entry in values["workers"]]
        values["ps"] = [WorkerEntry(**entry) for entry in values.get("ps", [])]
        earlier = values.get("earlier", [])
        values["earlier"] = [(float(start), float(end)) for start, end in earlier]
        return cls(**values)


@dataclass(frozen=True)
class CenterStatus:
    """What a center on a cluster said of itself."""

    plan: dict[str, Any]
    version: int
    members: list[int]
    progress: list[tuple[int, int, float]]  # of each rank: steps, exchanges, seconds

    def write(self, directory: Path) -> None:
        """Replace `status.json` in the center's directory."""
        directory.mkdir(mode=0o700, exist_ok=True)
        write_text(directory / STATUS_NAME, json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> CenterStatus | None:
        """Read it; None if there is none, or none that can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return cls(**json.loads((directory / STATUS_NAME).read_text("utf-8")))
        return None


def _last_sign(directory: Path) -> float:
    """Return when a launch whose launcher was killed was last seen alive."""
    signs = [directory / NAME, *(directory / "metrics").glob("rank-*.jsonl")]
    return max(path.stat().st_mtime for path in signs)
