"""What the launcher knows of its workers, in `RUN/launch.json`, for whoever watches the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from springline.center.shared import write_private

NAME = "launch.json"
WorkerState = Literal["starting", "running", "restarting", "finished", "failed", "stopped"]


@dataclass
class WorkerEntry:
    """One worker."""

    rank: int
    state: WorkerState = "starting"
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None


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

    def write(self, directory: Path) -> None:
        """Replace `RUN/launch.json`."""
        write_private(directory / NAME, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, directory: Path) -> LaunchState | None:
        """Read `RUN/launch.json`; None if the directory has none."""
        try:
            values = json.loads((directory / NAME).read_text("utf-8"))
        except FileNotFoundError:
            return None
        values["workers"] = [WorkerEntry(**entry) for entry in values["workers"]]
        return cls(**values)
