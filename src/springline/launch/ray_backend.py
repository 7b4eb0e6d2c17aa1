"""The workers of a run on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from springline.center import CenterError
from springline.center.directory import LAYOUT_NAME
from springline.center.ray_peer import OPTIONS
from springline.center.token import NAME as TOKEN
from springline.center.token import new_token, read_token, write_token
from springline.cluster_address import ClusterAddress
from springline.launch.backend import Backend, Say
from springline.launch.directory import CENTER, RUNS, LaunchError, RunDirectory
from springline.launch.keeper import storage_of
from springline.launch.process import Task
from springline.launch.program import Program
from springline.launch.ray_keeper import RayKeeper, center_name, check_center
from springline.launch.ray_worker import RayWorker, WorkerActor
from springline.launch.request import ClusterRequest
from springline.launch_state import CenterStatus

_ray: Any = ray  # some of its functions have no types
_WAIT = 10.0  # seconds without a machine after which a worker is reported


class RayBackend(Backend):
    """A Ray cluster, to which this process is connected: an actor per worker.

    Raises:
        LaunchError: the run cannot be there.
    """

    def __init__(
        self,
        program: Program,
        claim: RunDirectory,
        workers: int,
        asked: ClusterRequest,
        say: Say,
    ) -> None:
        directory, name = claim.path, center_name(claim.path)
        if (directory / CENTER / LAYOUT_NAME).exists():
            raise LaunchError(
                f"The center of the run in {directory} is on this machine, not on a cluster. Leave "
                "`--address` out, or start a new run."
            )
        sent = environment(asked.env or ())
        try:
            token = read_token(directory) if (directory / TOKEN).exists() else new_token()
        except CenterError as error:
            raise LaunchError(str(error)) from error
        context = ray.get_runtime_context()
        storage = storage_of(asked.storage, directory, name)
        cluster = ClusterAddress(context.gcs_address, name, token, asked.shards, storage)
        check_center(directory, cluster)
        where, command = _find(program, asked)
        actor = ray.remote(WorkerActor).options(**_options(asked))

        def worker(rank: int) -> RayWorker:
            create = partial(actor.remote, command, where, rank, workers)
            return RayWorker(directory, rank, create, partial(added, directory, cluster, sent))

        self._ranks = [worker(rank) for rank in range(workers)]
        self._center = RayKeeper(claim, say, cluster, self._given_up)
        super().__init__(self._ranks, [], self._center)
        self.center_name = name
        self.resumable = storage is not None
        if storage:
            self.rescue = "It may still be on the cluster, where the run then goes on."
        self._node = context.get_node_id()
        self._each = " and ".join(f"{v:g} {name}" for name, v in _resources(asked).items())
        self._say = say
        self._waiting: set[int] = set()  # ranks already reported as waiting
        try:
            write_token(directory, token)
        except OSError as error:
            raise LaunchError(f"Cannot write the run's token: {error}.") from error

    def tick(self) -> None:
        """Report each worker once that has had no machine for a while."""
        waiting = {worker.entry.rank for worker in self._ranks if worker.waits > _WAIT}
        if new := waiting - self._waiting:
            ranks = ", ".join(map(str, sorted(new)))
            which = f"Worker {ranks} has" if len(new) == 1 else f"Workers {ranks} have"
            self._say(
                f"{which} no machine that answers: there are no free resources (each needs "
                f"{self._each}), or a node is still starting or gone; see `ray status`. If the "
                "whole cluster is gone, start it again, and go on with the same `--run`."
            )
        self._waiting = waiting

    def gone(self, worker: Task) -> None:
        """Report it to the center, so that no round waits for it."""
        self._center.gone(worker.entry.rank)

    def hopeless(self) -> str | None:
        """Return why no restart of a worker helps: this machine or the center is lost."""
        if self._is_cut_off():
            return "This machine has left the cluster (its Ray node has died)"
        if not self.resumable and self._center.is_lost():
            return "A shard of the center has died, too, and has no checkpoint (`--storage none`)"
        return None

    def finish(self, hurried: Callable[[], bool]) -> Path | None:
        """Write the final center and end its actors."""
        if self._is_cut_off():
            raise CenterError("This machine has left the cluster.")
        return super().finish(hurried)

    def _given_up(self) -> list[int]:
        """Return the ranks that are not restarted."""
        return [worker.entry.rank for worker in self._ranks if worker.entry.is_over]

    def _is_cut_off(self) -> bool:
        """Whether the node that this process is connected through is gone."""
        try:
            return self._node not in {n["NodeID"] for n in _ray.nodes() if n["Alive"]}
        except (RayError, ConnectionError):
            return True


def connect_with(address: str, directory: str, run: Path) -> None:
    """Reconnect, with a directory that Ray copies to every machine, except for runs in it."""
    ray.shutdown()
    left_out = [f"/{RUNS}/"]
    with contextlib.suppress(ValueError):  # it is elsewhere
        left_out.append(f"/{run.resolve().relative_to(Path(directory).resolve()).as_posix()}/")
    copied = {"working_dir": directory, "excludes": left_out}
    try:
        ray.init(address=address, runtime_env=copied, **OPTIONS)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"The directory {directory} cannot be copied to the machines of the cluster: {error}"
        ) from error


def environment(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env`; no others leave this machine."""
    for name in names:
        if name not in os.environ:
            raise LaunchError(
                "`--env` takes the name of an environment variable that is set here, without a "
                f"value. Received: {name}."
            )
    return {name: os.environ[name] for name in names}


def added(run: Path, cluster: ClusterAddress, sent: dict[str, str]) -> dict[str, str]:
    """Return what a start adds to a worker's environment: no new center if the run has had one."""
    made = CenterStatus.read(run / CENTER) is not None
    return sent | replace(cluster, join=made).environment()


def room(asked: ClusterRequest) -> int:
    """Return how many workers fit on the cluster when nothing else runs there; at least 1."""
    total = _ray.cluster_resources()
    fits = [int(total.get(name, 0.0) / amount) for name, amount in _resources(asked).items()]
    return max(1, min(fits, default=1))


def _resources(asked: ClusterRequest) -> dict[str, float]:
    each = {"CPU": 1.0 if asked.cpus is None else asked.cpus, "GPU": asked.gpus or 0.0}
    return {name: amount for name, amount in each.items() if amount}


def _find(program: Program, asked: ClusterRequest) -> tuple[str | None, list[str]]:
    """Return the directory that a worker is run from, and the command as seen from there.

    Without a directory, it is where Ray has copied the user's to: the one of `--working-dir`, or
    that of the job that this launcher is (`ray job submit --working-dir`).
    """
    copied = asked.working_dir
    if copied is None and not ray.get_runtime_context().runtime_env.get("working_dir"):
        return str(Path.cwd()), program.command
    if program.is_module:
        return None, program.command
    try:
        script = Path(program.name).resolve().relative_to(Path(copied or ".").resolve())
    except ValueError as error:
        raise LaunchError(
            f"The script must be in the directory that is copied to the machines, {copied or '.'}. "
            f"Received: {program.name}."
        ) from error
    return None, [str(script), *program.arguments]


def _options(asked: ClusterRequest) -> dict[str, Any]:
    """Return the options of a worker's actor: Ray restarts it, and retries its calls."""
    each = _resources(asked)
    return {
        "num_cpus": each.get("CPU", 0.0),
        "num_gpus": each.get("GPU", 0.0),
        "memory": 1,  # Ray does not place an actor that asks for no resource at all
        "max_restarts": -1,
        "max_task_retries": -1,
        "scheduling_strategy": "SPREAD",
    }
