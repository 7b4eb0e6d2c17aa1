"""The workers of a run on many machines: a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from springline.center import CenterError, CheckpointError
from springline.center.ray_peer import OPTIONS
from springline.center.shared import LAYOUT_NAME
from springline.cluster import Cluster
from springline.launch.directory import CENTER, RUNS, LaunchError
from springline.launch.home import center_name, check_center, keep_newer, storage_of
from springline.launch.host import Assignment, put_token
from springline.launch.machine import Place, Say
from springline.launch.remote import RemoteWorker
from springline.launch.request import ClusterRequest
from springline.launch.room import check_room, free, needs, nodes
from springline.launch.task import Task
from springline.launch.watch import CenterWatch, ClusterKeeper, broken

_log = logging.getLogger("springline")
_WAIT = 10.0  # seconds after which we say that a worker has not started
_SILENCE = 20.0  # seconds after which we say that nobody answers
_AGAIN = 60.0  # seconds after which a warning is said again
_LONG = 240  # letters of it
_ANSWER = 6.0  # seconds that the center has to say that it cannot go on
_CLOSING = 5.0  # seconds that hosts may take to clean up
# Of the launcher's environment, what says something of its machine or its job and not of the run:
# names, and beginnings of names.
_OWN = (
    "RAY_",
    "SPRINGLINE_",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "DISPLAY",
    "HOSTNAME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "OLDPWD",
    "PWD",
    "RANK",
    "SLURM_",
    "SSH_",
    "TF_CONFIG",
    "TMPDIR",
    "TORCHELASTIC_",
    "WORLD_SIZE",
    "XDG_",
)


class Machines(Place):
    """The machines of a Ray cluster, to which this process is connected.

    Args:
        script: as the user typed it.
        arguments: the script's own.
        directory: the run's.
        workers: how many.
        asked: of the cluster.
        checkpoint_every: seconds from one checkpoint of the center to the next, beside those of
            its shards.
        say: told in a sentence what happens.

    Raises:
        LaunchError: the run cannot be there.
    """

    def __init__(
        self,
        script: str,
        arguments: list[str],
        directory: Path,
        workers: int,
        asked: ClusterRequest,
        checkpoint_every: float,
        say: Say,
    ) -> None:
        if (directory / CENTER / LAYOUT_NAME).exists():
            raise LaunchError(
                f"The center of the run in {directory} is on this machine, not on a cluster. Leave "
                "`--address` out, or start a new run."
            )
        check_room(asked, workers)
        name = center_name(directory)
        self._node = ray.get_runtime_context().get_node_id()
        address = ray.get_runtime_context().gcs_address
        storage = storage_of(asked, directory, name)
        if check_center(directory, name, storage) and storage:
            try:
                keep_newer(directory, storage, say)
            except CheckpointError as error:
                raise LaunchError(f"The run cannot go on from its storage: {error}") from error
        self._cluster = Cluster(address, name, asked.shards, storage)
        self._say = say
        self._asked = asked
        self._cut_off = False
        self._sayer = _Sayer(say)
        self._silent = False  # whether nobody answers
        self._told: set[int] = set()  # ranks of which we have said that they wait
        self._watch = CenterWatch(directory, name, asked.shards)
        where, script = _find(script, asked)
        token = uuid.uuid4().hex
        if storage:
            try:
                put_token(storage, token)
            except CheckpointError as error:
                raise LaunchError(f"{error} Give another with `--storage`.") from error
        environment = _surroundings(os.environ)

        def worker(rank: int) -> RemoteWorker:
            place = rank, workers, self._cluster, environment, token
            assignment = Assignment(script, arguments, where, *place)
            return RemoteWorker(assignment, directory, _options(asked))

        self._workers = [worker(rank) for rank in range(workers)]
        self._keeper = ClusterKeeper(directory, checkpoint_every, say, name)
        super().__init__(self._workers, [], self._keeper)
        self.center_name = name
        self.resumable = storage is not None
        self.rescue = "Its last checkpoint here can be read with `springline export`."
        if storage:
            self.rescue = "It may still be on the cluster, where the run then goes on."

    def begin(self) -> None:
        """Begin to keep and to watch the center."""
        _log.addHandler(self._sayer)
        super().begin()
        self._watch.start()

    def tick(self) -> None:
        """Say, once, that nobody answers, and who has not started for a while."""
        silence = self._watch.silence
        if silence > _SILENCE and not self._silent:
            self._say(
                f"The center has not answered for {silence:.0f} s. It is waited for. If the whole "
                "cluster is gone, Ray ends this process within a minute or two: start the cluster "
                "again, and go on with the same `--run`."
            )
        self._silent = silence > _SILENCE
        waiting = [w.entry.rank for w in self._workers if w.waits > _WAIT]
        new = [rank for rank in waiting if rank not in self._told]
        self._told = set(waiting)
        if new:
            ranks = ", ".join(map(str, new))
            who = f"Worker {ranks} has" if len(new) == 1 else f"Workers {ranks} have"
            self._say(
                f"{who} not started yet, for want of room or because a machine is still being made "
                f"ready: each needs {needs(self._asked)}. {free(self._asked)}"
            )

    def gone(self, worker: Task) -> None:
        """Tell the center, so that nobody waits for it."""
        if worker.entry.exit_code is None and self._is_cut_off():
            worker.refused = (
                f"{worker.name.capitalize()} {worker.describe_end()}. This machine has left the "
                "cluster (its Ray node has died), and all workers are lost with it: the run ends. "
                "Start Ray here again."
            )
        elif (worker.entry.exit_code or 0) > 0 and (why := self._broken()):
            worker.refused = f"{worker.name.capitalize()} {worker.describe_end()}. {why}"
        else:
            self._watch.gone(worker.entry.rank)

    def finish(self, hurried: Callable[[], bool]) -> Path | None:
        """Look for the last time, keep the center and end it."""
        self._cut_off = self._is_cut_off()
        if self._cut_off:
            raise CenterError("This machine has left the cluster.")
        self._watch.finish()
        return self._keeper.finish(hurried)

    def release(self) -> None:
        """Let the hosts go."""
        self._watch.end()
        self._keeper.end()
        _log.removeHandler(self._sayer)
        if self._cut_off:
            return  # they are gone, and nobody answers
        for worker in self._workers:
            worker.release()
        if closing := [worker.closing for worker in self._workers if worker.closing is not None]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSING)

    def _broken(self) -> str | None:
        """Return why the center cannot go on, if it says so in time; with a storage it can."""
        if self.resumable:
            return None
        found: list[str | None] = []
        asks = threading.Thread(
            target=lambda: found.append(broken(self._cluster.center)), daemon=True
        )
        asks.start()
        asks.join(_ANSWER)
        return found[0] if found else None

    def _is_cut_off(self) -> bool:
        """Whether the node that this process is connected through is gone."""
        try:
            return self._node not in {node["NodeID"] for node in nodes()}
        except (RayError, ConnectionError):
            return True


class _Sayer(logging.Handler):
    """Says what is logged while we ask the center, once in a while."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Say it, unless the same was said a moment ago."""
        if time.monotonic() - self._said.get(record.msg, -_AGAIN) >= _AGAIN:
            self._said[record.msg] = time.monotonic()
            text = " ".join(record.getMessage().split())
            self._say(text if len(text) < _LONG else f"{text[:_LONG]} …")


def connect_with(address: str, directory: str, run: Path) -> None:
    """Connect to the cluster anew, with a directory that Ray copies to every machine.

    Args:
        address: the cluster's.
        directory: to be copied, but for what runs have left in it.
        run: the run's own directory.
    """
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


def _surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what workers on other machines find of the launcher's environment.

    >>> _surroundings({"RANK": "3", "RANKING": "best", "SLURM_JOB_ID": "7"})
    {'RANKING': 'best'}
    """
    beginnings = tuple(own for own in _OWN if own.endswith("_"))
    return {
        name: value
        for name, value in environment.items()
        if name not in _OWN and not name.startswith(beginnings)
    }


def _find(script: str, asked: ClusterRequest) -> tuple[str | None, str]:
    """Return the directory that a host is to be in, and the script as seen from there.

    Without a directory, a host is where Ray has copied the user's to: the one of `--working-dir`,
    or that of the job that this launcher is (`ray job submit --working-dir`).
    """
    copied = Path(asked.working_dir) if asked.working_dir else None
    if copied is None and ray.get_runtime_context().runtime_env.get("working_dir"):
        copied = Path.cwd()
    if copied is None:
        return str(Path.cwd()), script
    try:
        return None, str(Path(script).resolve().relative_to(copied.resolve()))
    except ValueError as error:
        raise LaunchError(
            f"The script must be in the directory that is copied to the machines, {copied}. "
            f"Received: {script}."
        ) from error


def _options(asked: ClusterRequest) -> dict[str, Any]:
    return {
        "num_cpus": 1.0 if asked.cpus is None else asked.cpus,
        "num_gpus": asked.gpus or 0.0,
        "memory": 1,  # of an actor that asks for nothing at all, Ray minds no place
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
    }
