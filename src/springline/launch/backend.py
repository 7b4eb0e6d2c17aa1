"""Where the workers of a run are: processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from springline.center import CenterError
from springline.launch.directory import LaunchError, RunDirectory
from springline.launch.guard import Guard
from springline.launch.keeper import Keeper, OtherKeepers
from springline.launch.process import Job, Task, WorkerProcess, cores, environment
from springline.launch.program import Program
from springline.launch.request import ClusterRequest, check_first_file
from springline.launch_state import LaunchState
from springline.run import FROM

Say = Callable[[str], None]


class Backend:
    """Makes the workers of a run and keeps its center.

    Attributes:
        workers: by rank.
        servers: parameter servers of a TensorFlow cluster, by number.
        keeper: the center's.
        rescue: advice for when the center could not be saved at the end.
        center_name: what the center is called, if it has a name.
        resumable: whether the run can be resumed after a stop.
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
        """Do periodic work; called several times a second."""

    def gone(self, worker: Task) -> None:
        """Handle a worker that has ended or was lost."""

    def hopeless(self) -> str | None:
        """Return why no restart of a worker helps, if so."""
        return None

    def finish_others(self) -> bool:
        """Write the final centers but the run's own, if it has others; whether all are whole."""
        return True

    def finish(self, hurried: Callable[[], bool]) -> Path | None:
        """Write the final center when all workers are gone; see `Keeper.finish`."""
        return self.keeper.finish(hurried)

    def release(self) -> None:
        """Release what the run holds."""


class LocalBackend(Backend):
    """This machine: workers are processes, the center is in memory."""

    def __init__(
        self,
        program: Program,
        directory: Path,
        workers: int,
        ps: int,
        keeper: Keeper,
        others: OtherKeepers,
        start_from: Path | None,
    ) -> None:
        self._others = others
        self._cluster = LocalCluster(ps, workers) if ps else None
        self._guard = guard = Guard()

        def task(number: int, job: Job) -> WorkerProcess:
            ours = environment(os.environ, directory, number, workers)
            if start_from:
                ours[FROM] = str(start_from.absolute())
            if self._cluster:
                ours |= self._cluster.environment(job, number, os.environ)
            if job == "ps":  # it has no rank
                del ours["SPRINGLINE_RANK"], ours["SPRINGLINE_WORKERS"]
            return WorkerProcess(program.command, directory, number, ours, job, guard=guard)

        tasks = [task(rank, "worker") for rank in range(workers)]
        super().__init__(tasks, [task(number, "ps") for number in range(ps)], keeper)
        self.rescue = (
            f"It is still in memory: `springline export {directory} PATH` writes it elsewhere."
        )

    def begin(self) -> None:
        """Begin to keep the centers: those that an earlier launch has left, too."""
        super().begin()
        self._others.look()

    def tick(self) -> None:
        """Find the centers that the script has made."""
        self._others.look()

    def finish_others(self) -> bool:
        """Write the final centers of other optimizers than the first."""
        return self._others.finish()

    def release(self) -> None:
        """Release the ports of a TensorFlow cluster."""
        self._guard.close()
        if self._cluster:
            self._cluster.release()


class LocalCluster:
    """A free port for every task, reserved for the lifetime of this object.

    The ports are bound and not listened at, with `SO_REUSEADDR`, as TensorFlow's servers bind
    theirs: a task can then listen at its port, also after a restart, and no other process is given
    the port in between.
    """

    def __init__(self, ps: int, workers: int) -> None:
        self._held = [_hold() for _ in range(ps + workers)]
        addresses = [f"127.0.0.1:{held.getsockname()[1]}" for held in self._held]
        self.jobs: dict[Job, list[str]] = {"ps": addresses[:ps], "worker": addresses[ps:]}

    def environment(self, job: Job, task: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return a task's own variables: `TF_CONFIG`, and how much is logged."""
        place = {"cluster": self.jobs, "task": {"type": job, "index": task}}
        level = inherited.get("TF_CPP_MIN_LOG_LEVEL", "1")  # warnings and errors
        return {"TF_CONFIG": json.dumps(place), "TF_CPP_MIN_LOG_LEVEL": level}

    def release(self) -> None:
        """Release the ports."""
        for held in self._held:
            held.close()


def _hold() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))  # TensorFlow's servers listen on all interfaces
    return held


def choose_backend(
    claim: RunDirectory,
    program: Program,
    workers: int | None,
    ps: int | None,
    asked: ClusterRequest,
    start_from: Path | None,
    say: Say,
) -> tuple[Backend, ClusterRequest]:
    """Return a run's backend, and what is asked of a cluster; see `Launcher` for the rest.

    What was not given is as in the last launch in the directory.

    Raises:
        LaunchError: the run cannot be there.
    """
    directory, before = claim.path, LaunchState.read(claim.path)
    given = asked.address
    asked = asked.absolute().over(before.cluster if before else None, directory)
    if asked.address and not claim.private and before and asked.address != given:
        raise LaunchError(
            f"Others could write to {directory}, so the cluster that it names ({asked.address}) is "
            "not trusted. If it is the right one, name it: `--address`."
        )
    if before and ps is None:
        ps = len(before.ps)
    if before and workers is None and (before.cluster or (before.ps and ps)):
        workers = len(before.workers)
    if before and before.ps and ps and workers != len(before.workers):
        raise LaunchError(
            f"The run in {directory} has {len(before.workers)} workers, which is fixed. Received: "
            f"--workers {workers}. Leave it out, or start a new run."
        )
    asked.check(ps)
    if start_from:
        check_first_file(start_from, asked.address, ps)
        if claim.configured_workers() is not None:
            raise LaunchError(
                f"The run in {directory} has a center, with which it goes on. Received: --from "
                f"{start_from}. Leave it out, or start a new run."
            )
    if not asked.address:
        workers = _number(claim, workers, max(2, cores()))
        keeper = Keeper(claim, say)
        others = OtherKeepers(claim, say)
        local = LocalBackend(program, directory, workers, ps or 0, keeper, others, start_from)
        return local, asked
    try:
        from springline.center.ray import connect

        connect(asked.address)
    except (CenterError, ImportError) as error:
        raise LaunchError(str(error)) from error
    from springline.launch.ray_backend import RayBackend, connect_with, room  # Ray is there

    if asked.working_dir:
        connect_with(asked.address, asked.working_dir, directory)
    workers = _number(claim, workers, room(asked))
    return RayBackend(program, claim, workers, asked, say), asked


def _number(claim: RunDirectory, workers: int | None, default: int) -> int:
    """Return the number of workers to start."""
    configured = claim.configured_workers()
    if workers is None:
        return configured or default
    if configured not in (None, workers):
        raise LaunchError(
            f"The run in {claim.path} has {configured} workers, which is fixed. Received: "
            f"--workers {workers}. Leave it out, or start a new run."
        )
    return workers
