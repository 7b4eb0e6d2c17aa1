"""The workers of a run on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
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
from springline.launch.ray_worker import RayWorker
from springline.launch.request import ClusterRequest
from springline.launch.worker_actor import Assignment

_log = logging.getLogger("springline")
_ray: Any = ray  # some of its functions have no types
_WAIT = 10.0  # seconds without a machine after which a worker is reported
_AGAIN = 60.0  # seconds after which a warning is repeated


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
        directory = claim.path
        if (directory / CENTER / LAYOUT_NAME).exists():
            raise LaunchError(
                f"The center of the run in {directory} is on this machine, not on a cluster. Leave "
                "`--address` out, or start a new run."
            )
        check_room(asked, workers)
        sent = environment(asked.env or ())
        name = center_name(directory)
        storage = storage_of(asked.storage, directory, name)
        self._token = _token(directory)
        check_center(directory, name, storage, self._token)
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        cluster = ClusterAddress(context.gcs_address, name, self._token, asked.shards, storage)
        where, command = _find(program, asked)

        def worker(rank: int) -> RayWorker:
            assignment = Assignment(command, where, rank, workers, cluster, sent)
            return RayWorker(assignment, directory, _options(asked))

        self._claim = claim
        self._ranks = [worker(rank) for rank in range(workers)]
        self._center = RayKeeper(claim, say, name, storage, self._token, self._given_up)
        super().__init__(self._ranks, [], self._center)
        self.center_name = name
        self.resumable = storage is not None
        if storage:
            self.rescue = "It may still be on the cluster, where the run then goes on."
        self._asked = asked
        self._say = say
        self._warnings = _Warnings(say)
        self._waiting: set[int] = set()  # ranks already reported as waiting
        self._cut_off = False

    def begin(self) -> None:
        """Write the center's token, before the center is made, and start to watch it."""
        try:
            write_token(self._claim.path, self._token)
        except OSError as error:
            self._say(f"Could not write {self._claim.path / TOKEN}: {error.strerror}.")
        _log.addHandler(self._warnings)
        super().begin()

    def tick(self) -> None:
        """Report each worker once that has had no machine for a while."""
        waiting = {worker.entry.rank for worker in self._ranks if worker.waits > _WAIT}
        if new := waiting - self._waiting:
            ranks = ", ".join(map(str, sorted(new)))
            which = f"Worker {ranks} has" if len(new) == 1 else f"Workers {ranks} have"
            self._say(
                f"{which} no machine that answers: there are no free resources (each needs "
                f"{_amounts(_resources(self._asked))}), or a node is still starting or gone; see "
                "`ray status`. If the whole cluster is gone, Ray ends this process within a minute "
                "or two: start the cluster again, and go on with the same `--run`."
            )
        self._waiting = waiting

    def gone(self, worker: Task, stopping: bool) -> None:
        """Report it to the center, so that no round waits for it; end a hopeless run."""
        how = f"{worker.name.capitalize()} {worker.describe_end()}."
        if stopping or worker.refused or worker.entry.exit_code == 0:
            self._center.gone(worker.entry.rank)
        elif self._is_cut_off():
            worker.refused = (
                f"{how} This machine has left the cluster (its Ray node has died), and all workers "
                "are lost with it: the run ends. Start Ray here again."
            )
        elif not self.resumable and self._center.is_lost():
            worker.refused = (
                f"{how} A part of the center has died, too, and is kept nowhere (`--storage "
                "none`): the run ends."
            )
        else:
            self._center.gone(worker.entry.rank)

    def finish(self, hurried: Callable[[], bool]) -> Path | None:
        """Write the final center and end its actors."""
        self._cut_off = self._is_cut_off()
        if self._cut_off:
            raise CenterError("This machine has left the cluster.")
        return super().finish(hurried)

    def release(self) -> None:
        """Drop the actors."""
        self._center.end()
        _log.removeHandler(self._warnings)
        if self._cut_off:
            return  # the actors are gone with the cluster
        for worker in self._ranks:
            worker.release()

    def _given_up(self) -> list[int]:
        """Return the ranks that are not restarted."""
        return [worker.entry.rank for worker in self._ranks if worker.entry.is_over]

    def _is_cut_off(self) -> bool:
        """Whether the node that this process is connected through is gone."""
        try:
            return self._node not in {n["NodeID"] for n in _ray.nodes() if n["Alive"]}
        except (RayError, ConnectionError):
            return True


class _Warnings(logging.Handler):
    """Prints warnings about the center, each at most once a minute."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said: dict[tuple[str, ...], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print it, unless the same warning was printed within the last minute."""
        args = record.args if isinstance(record.args, tuple) else ()
        what = record.msg, *map(str, args[:1])  # numbers may follow
        if time.monotonic() - self._said.get(what, -_AGAIN) >= _AGAIN:
            self._said[what] = time.monotonic()
            self._say(" ".join(record.getMessage().split()))


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
        if "=" in name:
            raise LaunchError(f"`--env` takes a name, without a value. Received: {name}.")
        if name not in os.environ:
            raise LaunchError(
                f"The workers are to get the environment variable {name} (`--env`), but it is not "
                "set here. Set it."
            )
    return {name: os.environ[name] for name in names}


def room(asked: ClusterRequest) -> int:
    """Return how many workers fit on the cluster when nothing else runs there; at least 1."""
    total = _ray.cluster_resources()
    fits = [int(total.get(name, 0.0) / amount) for name, amount in _resources(asked).items()]
    return max(1, min(fits, default=1))


def check_room(asked: ClusterRequest, workers: int) -> None:
    """Refuse more workers than fit on the cluster."""
    total, each = _ray.cluster_resources(), _resources(asked)
    if any(workers * amount > total.get(name, 0.0) for name, amount in each.items()):
        raise LaunchError(
            f"{workers} workers with {_amounts(each)} each do not fit on the cluster, which has "
            f"{_amounts({name: total.get(name, 0.0) for name in ('CPU', 'GPU')})}. Give each less "
            "with `--cpus` and `--gpus`, start fewer, or add machines."
        )


def _token(directory: Path) -> str:
    """Return the token of a run's center; that of a new one is drawn."""
    try:
        return read_token(directory) if (directory / TOKEN).exists() else new_token()
    except CenterError as error:
        raise LaunchError(str(error)) from error


def _resources(asked: ClusterRequest) -> dict[str, float]:
    each = {"CPU": 1.0 if asked.cpus is None else asked.cpus, "GPU": asked.gpus or 0.0}
    return {name: amount for name, amount in each.items() if amount}


def _amounts(amounts: Mapping[str, float]) -> str:
    """Format amounts of resources.

    >>> _amounts({"CPU": 1.0, "GPU": 0.5})
    '1 CPU and 0.5 GPUs'
    """
    return " and ".join(f"{v:g} {k}" + "s" * (v != 1) for k, v in amounts.items()) or "nothing"


def _find(program: Program, asked: ClusterRequest) -> tuple[str | None, list[str]]:
    """Return the directory that a worker is run from, and the command as seen from there.

    Without a directory, it is where Ray has copied the user's to: the one of `--working-dir`, or
    that of the job that this launcher is (`ray job submit --working-dir`).
    """
    copied = Path(asked.working_dir) if asked.working_dir else None
    if copied is None and ray.get_runtime_context().runtime_env.get("working_dir"):
        copied = Path.cwd()
    if copied is None:
        return str(Path.cwd()), program.command
    if program.is_module:
        return None, program.command
    try:
        script = Path(program.name).resolve().relative_to(copied.resolve())
    except ValueError as error:
        raise LaunchError(
            f"The script must be in the directory that is copied to the machines, {copied}. "
            f"Received: {program.name}."
        ) from error
    return None, [str(script), *program.arguments]


def _options(asked: ClusterRequest) -> dict[str, Any]:
    """Return the options of a worker's actor: the launcher restarts it, and retries its calls."""
    return {
        "num_cpus": 1.0 if asked.cpus is None else asked.cpus,
        "num_gpus": asked.gpus or 0.0,
        "memory": 1,  # Ray does not place an actor that asks for no resource at all
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 4,  # polls, which may be retried, and signals
        "scheduling_strategy": "SPREAD",
    }
