"""Where the workers of a run are: on this machine, or elsewhere (`machines.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from springline.launch.cluster import LocalCluster
from springline.launch.keeper import Keeper
from springline.launch.process import WorkerProcess, environment
from springline.launch.task import Job, Task

Say = Callable[[str], None]


class Place:
    """Makes the workers of a run and keeps its center.

    Attributes:
        workers: by rank.
        servers: parameter servers of a TensorFlow cluster, by number.
        keeper: the center's.
        rescue: what to do if the center could not be saved at the end.
        center_name: what the center is called, if it has a name.
        resumable: whether the run can go on after it was stopped.
    """

    rescue = ""
    center_name: str | None = None
    resumable = True

    def __init__(self, workers: Sequence[Task], servers: Sequence[Task], keeper: Keeper) -> None:
        self.workers = list(workers)
        self.servers = list(servers)
        self.keeper = keeper

    def begin(self) -> None:
        """Begin to keep the center: the workers are about to start."""
        self.keeper.start()

    def tick(self) -> None:
        """Do what is to be done several times a second."""

    def gone(self, worker: Task) -> None:
        """Take note that a worker has ended or was lost."""

    def finish(self, hurried: Callable[[], bool]) -> Path | None:
        """Keep the center for good, when all workers are gone; see `Keeper.finish`.

        Args:
            hurried: whether somebody does not want to wait any more.
        """
        return self.keeper.finish()

    def release(self) -> None:
        """Give back what the run holds."""


class Machine(Place):
    """This machine: workers are processes, the center is in memory.

    Args:
        command: the script and its arguments.
        directory: the run's.
        workers: how many.
        ps: how many parameter servers of a TensorFlow cluster.
        keeper: the center's.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, workers: int, ps: int, keeper: Keeper
    ) -> None:
        self._cluster = LocalCluster(ps, workers) if ps else None

        def task(number: int, job: Job) -> WorkerProcess:
            ours = environment(os.environ, directory, number, workers)
            if self._cluster:
                ours |= self._cluster.environment(job, number, os.environ)
            if job == "ps":  # it has no rank
                del ours["SPRINGLINE_RANK"], ours["SPRINGLINE_WORKERS"]
            return WorkerProcess(command, directory, number, ours, job)

        tasks = [task(rank, "worker") for rank in range(workers)]
        super().__init__(tasks, [task(number, "ps") for number in range(ps)], keeper)
        self.rescue = (
            f"It is still in memory: `springline export {directory} PATH` writes it elsewhere."
        )

    def release(self) -> None:
        """Let others have the ports of a TensorFlow cluster."""
        if self._cluster:
            self._cluster.release()
