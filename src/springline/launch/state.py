"""What the launcher knows of its workers, in `RUN/launch.json`, for whoever watches the run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

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
        temporary = directory / f".{NAME}"
        fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
        temporary.replace(directory / NAME)

    @classmethod
    def read(cls, directory: Path) -> LaunchState | None:
        """Read `RUN/launch.json`; None if the directory has none."""
        try:
            values = json.loads((directory / NAME).read_text("utf-8"))
        except FileNotFoundError:
            return None
        values["workers"] = [WorkerEntry(**entry) for entry in values["workers"]]
        return cls(**values)
