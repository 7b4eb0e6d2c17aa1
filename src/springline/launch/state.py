"""What the launcher knows of its workers, in `RUN/launch.json`, for whoever watches the run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from springline.center.shared import write_private

NAME = "launch.json"
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
        write_private(directory / NAME, json.dumps(asdict(self), indent=1))

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


def _last_sign(directory: Path) -> float:
    """Return when a launch whose launcher was killed was last seen alive."""
    signs = [directory / NAME, *(directory / "metrics").glob("rank-*.jsonl")]
    return max(path.stat().st_mtime for path in signs)
