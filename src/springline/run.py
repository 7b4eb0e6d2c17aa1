"""The run a script is part of, found in the environment.

    SPRINGLINE_RUN, SPRINGLINE_RANK, SPRINGLINE_WORKERS   set by `springline run`
    SPRINGLINE_ADDRESS, SPRINGLINE_CENTER, ...            with `--address`: see `cluster_address.py`
    SPRINGLINE_FROM                                       with `--from`: a file for a new center
    RANK, WORLD_SIZE, MASTER_ADDR, LOCAL_WORLD_SIZE       set by `torchrun`, or as it does

Without any, a script is a run of one worker.

    RUN/center/     the shared center; those of other optimizers: see `run_centers.py`
    RUN/token       that of a center on a cluster
    RUN/metrics/    one file of JSON lines per worker
    RUN/logs/       what the workers print
    RUN/stop        asks all workers to finish early
    RUN/warnings/   what the workers warn of, which `springline run` prints
    RUN/report.txt  what `report` was given
    RUN/total       how many steps each worker is to make, if it counts them with `steps`
    RUN/lightning   the step of the checkpoint that Lightning began the run with
    RUN/best.json   what Lightning's rank 0 has found to be the best checkpoints
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from springline import checks
from springline.center import CenterError, SharedCenter
from springline.center.checkpoint import describe, newest
from springline.center.shared import CHECKPOINT_NAME
from springline.cluster_address import ClusterAddress
from springline.errors import DamagedError
from springline.files import append, can_do_without, write_text
from springline.launch_state import LaunchState

REPORT, WARNINGS, FROM = "report.txt", "warnings", "SPRINGLINE_FROM"
FIRST_STEP, BEST = "lightning", "best.json"
_TORCHS = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # what a process group needs

# What trainers take for a process group that is theirs: the model is then in
# DistributedDataParallel, which gives all workers the same gradients.
PROCESS_GROUP = (*sorted(_TORCHS), "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_log = logging.getLogger("springline")


@dataclass(frozen=True)
class Run:
    """A run and this process's place in it.

    If its center is on a cluster, the directory is this worker's own, and its launcher looks into
    it.
    """

    directory: Path | None = None  # None for a script that runs alone
    rank: int = 0
    workers: int = 1  # the configured number
    cluster: ClusterAddress | None = None  # where the center is, if it is not on this machine

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Run:
        """Find the run.

        >>> Run.from_environment({"SPRINGLINE_WORKERS": "4", "SPRINGLINE_RANK": "2"})
        Run(directory=None, rank=2, workers=4, cluster=None)
        """
        directory = environment.get("SPRINGLINE_RUN")
        cluster = ClusterAddress.from_environment(environment)
        if cluster and not directory:  # it was not started by a launcher
            directory = f"runs/{cluster.center}"
        if "SPRINGLINE_RANK" in environment or "SPRINGLINE_WORKERS" in environment:
            rank = _number(environment, "SPRINGLINE_RANK", 0)
            workers = _number(environment, "SPRINGLINE_WORKERS", 1)
        elif environment.keys() >= _TORCHS or "TORCHELASTIC_RUN_ID" in environment:
            rank = _number(environment, "RANK", 0)
            workers = _number(environment, "WORLD_SIZE", 1)
            if environment.get("TORCHELASTIC_RUN_ID") and workers == _number(
                environment, "LOCAL_WORLD_SIZE", 1
            ):
                # All ranks are on this machine, children of one agent.
                directory = directory or f"runs/torchrun-{_parent()}"
        else:
            rank, workers = 0, 1
        if not 0 <= rank < workers:
            raise ValueError(
                f"The rank must be from 0 to workers − 1. Received: rank {rank} of {workers} "
                "workers. Look at SPRINGLINE_RANK and SPRINGLINE_WORKERS."
            )
        return cls(Path(directory) if directory else None, rank, workers, cluster)

    @property
    def center_directory(self) -> Path | None:
        """Where the run's center is; on a cluster, what stands for it here."""
        return self.directory / "center" if self.directory else None

    def check_meeting(self, *more: str) -> None:
        """Refuse one of several workers that has no run in which it could meet the others.

        Args:
            *more: what else its user may do.
        """
        if self.workers > 1 and self.directory is None:
            ways = "start them with `springline run`", *more
            raise ValueError(
                f"This is worker {self.rank} of {self.workers}, but there is no run where they "
                "could meet. Set SPRINGLINE_RUN to a directory that they share, or "
                f"{', or '.join(ways)}."
            )

    def start_step(self) -> int:
        """How far this rank had come before its restart: 0 in a new run."""
        if self.center_directory is None:
            return 0
        if self.cluster:
            steps = self.cluster.steps()
            return steps[self.rank] if self.rank < len(steps) else 0
        try:
            with SharedCenter.open(self.center_directory) as center:
                steps = [rank.steps for rank in center.progress()]
        except DamagedError:
            raise
        except CenterError:
            saved = newest(self.center_directory / CHECKPOINT_NAME)
            steps = describe(saved).steps if saved else []
        return steps[self.rank] if self.rank < len(steps) else 0

    def stop(self) -> None:
        """Ask all workers to finish early."""
        if self.directory:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.directory / "stop").touch(mode=0o600)
        else:
            _alone["stop"] = True

    def given_up(self) -> list[int] | None:
        """Return the ranks that the launcher does not restart; None if there is no launcher."""
        launch = None
        with contextlib.suppress(CenterError):  # it is damaged: unknown
            launch = LaunchState.read(self.directory) if self.directory else None
        if launch is None or launch.ended or not Path(f"/proc/{launch.pid}").exists():
            return None
        return [worker.rank for worker in launch.workers if worker.is_over]

    def stopping(self) -> bool:
        """Whether all workers were asked to finish early."""
        if self.directory:
            return (self.directory / "stop").exists()
        return _alone["stop"]

    @can_do_without("The number of steps")
    def begin(self, step: int, total: int) -> None:
        """Report that this worker starts at a step, and how many it is to make."""
        if self.directory is None:
            return
        if self not in _begun:
            _begun.add(self)
            self.log(step, {})  # a line without values begins an incarnation of the worker
        if total != _totals.get(self):
            _totals[self] = total
            write_text(self.directory / "total", f"{total}\n")

    @can_do_without("A line of the metrics")
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to this worker's metrics."""
        plain = checks.metrics(values)
        if self.directory is None:
            return
        folder = _folder(self.directory, "metrics")
        line = {"time": time.time(), "step": step, **plain}
        append(folder / f"rank-{self.rank}.jsonl", f"{json.dumps(line)}\n".encode())


_alone = {"stop": False}
_seen: set[Path] = set()  # directories of runs
_begun: set[Run] = set()  # runs in which this process has begun to count steps
_totals: dict[Run, int] = {}  # what it has last reported of each


def rank() -> int:
    """Return this worker's rank: which part of the data is its own."""
    return Run.from_environment().rank


def workers() -> int:
    """Return the configured number of workers."""
    return Run.from_environment().workers


def stop() -> None:
    """Ask all workers of the run to finish early; see `stopping` and `steps`."""
    Run.from_environment().stop()


def stopping() -> bool:
    """Whether all workers have been asked to finish early."""
    return Run.from_environment().stopping()


def directory() -> Path | None:
    """Return the run's directory; None for a script that runs alone."""
    return Run.from_environment().directory


class ToLauncher(logging.Handler):
    """Lets `springline run` print what a worker warns of, beside its own log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line to the worker's warnings."""
        run = Run.from_environment()
        with contextlib.suppress(OSError):  # a full disk costs no worker
            if run.directory:
                folder = _folder(run.directory, WARNINGS)
                line = " ".join(record.getMessage().split())
                append(folder / f"rank-{run.rank}.txt", f"{line}\n".encode())
        others = [*logging.getLogger().handlers, *logging.getLogger("springline").handlers]
        if all(handler is self for handler in others) and logging.lastResort:  # as without us
            logging.lastResort.handle(record)


def _folder(directory: Path, name: str) -> Path:
    """Return a folder of a run's directory, made if need be; one that was moved stays away."""
    folder = directory / name
    folder.mkdir(mode=0o700, parents=directory not in _seen, exist_ok=True)
    _seen.add(directory)
    return folder


def _parent() -> str:
    """Return the parent's process id and when it was started: ids are used again."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{os.getppid()}/stat").read_text("utf-8").rpartition(")")[2].split()
        return f"{os.getppid()}-{fields[19]}"
    return str(os.getppid())


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.strip().isdigit():
        raise ValueError(f"{name} must be a whole number. Received: {name}={text!r}.")
    return int(text)
