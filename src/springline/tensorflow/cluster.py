"""This process's place in a cluster: `TF_CONFIG`, from a scheduler or `springline run`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from springline.run import Run
from springline.tensorflow.trio import v1

_LOOK = 1.0  # seconds between two looks at the parameter servers, and for each to answer
_WARN_EVERY = 30.0
_JOBS = ("chief", "worker", "ps")
_log = logging.getLogger("springline")
_watches: list[Watch] = []  # of this process


@dataclass(frozen=True)
class Cluster:
    """One task of a cluster."""

    spec: Any  # tf.train.ClusterSpec
    job: str  # "chief", "worker" or "ps"
    task: int  # its number in the job
    server: Any  # tf.distribute.Server; None for a process without a cluster

    @property
    def target(self) -> str:
        """The `master` of a session."""
        return str(self.server.target) if self.server else ""

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that makes the center and saves it."""
        if "chief" in self.spec.jobs:
            return self.job == "chief"
        return self.job == "worker" and self.task == 0

    @property
    def rank(self) -> int:
        """Its number among all workers: the chief is 0 if there is one, and workers follow it."""
        return self.task + (self.job == "worker" and "chief" in self.spec.jobs)

    @property
    def num_worker(self) -> int:
        """How many workers there are, the chief among them."""
        jobs = {"chief", "worker"}.intersection(self.spec.jobs)
        return sum(map(self.spec.num_tasks, jobs)) or 1

    @property
    def device(self) -> str:
        """The device of this task's own variables: a getter's `worker_device`."""
        return f"/job:{self.job}/task:{self.task}" if self.server else ""

    @property
    def config(self) -> Any:
        """A session's config: it sees the servers and itself, and waits for nobody else."""
        filters = ["/job:ps", self.device] if self.server else []
        return v1.ConfigProto(device_filters=filters)

    @property
    def setter(self) -> Any:
        """A device function that puts centers and the global step on the servers, in turn."""
        if "ps" not in self.spec.jobs:
            return self.device
        return v1.train.replica_device_setter(
            worker_device=self.device, ps_device="/job:ps", cluster=self.spec
        )


def cluster(serve: bool = True, ps_timeout: float | None = 60.0) -> Cluster:
    """Return this task's place, with its server started.

    Without `TF_CONFIG` it is a process of its own: one worker, no server.

    When a parameter server is gone, TensorFlow's sessions try to reach it for ever, without a word.
    So a worker watches them: once one that could be reached has not been for `ps_timeout` seconds,
    a sentence that names it goes to stderr and the process ends at once, with status 1. One that
    comes back in time is empty, and a `MonitoredTrainingSession` of the chief restores its last
    checkpoint. Training that has ended (the hook says so) needs them no more, and whatever the
    script does then goes on without them. Under `springline run` a parameter server that dies ends
    the run without delay.

    Args:
        serve: whether a parameter server serves here and now; then this does not return.
        ps_timeout: seconds that a parameter server may be out of reach; None to wait for ever.

    Raises:
        ValueError: `TF_CONFIG` is wrong; the message names what.
        RuntimeError: the port is taken, or there are several workers and no `TF_CONFIG`.
    """
    if ps_timeout is not None and not ps_timeout > 0:
        raise ValueError(f"`ps_timeout` must be a number of seconds > 0. Received: {ps_timeout!r}.")
    given = os.environ.get("TF_CONFIG")
    if not given:
        run = Run.from_environment()
        if run.workers > 1:
            raise RuntimeError(
                f"This is worker {run.rank} of {run.workers}, but there is no TF_CONFIG and so no "
                "parameter server where they could meet: each would train a model of its own. "
                f"Start them with `springline run --ps 1 --workers {run.workers} SCRIPT` (add "
                "`--ps 1`). Eager mode needs no cluster: leave `cluster()` out."
            )
        return Cluster(tf.train.ClusterSpec({}), "worker", 0, None)
    spec, job, task = read_config(given)
    address = spec.task_address(job, task)
    try:
        server = tf.distribute.Server(spec, job_name=job, task_index=task)
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"The server of /job:{job}/task:{task} could not listen at {address}: {error.message}. "
            "Is another process using the port?"
        ) from error
    if serve and job == "ps":
        threading.Event().wait()  # for ever; unlike `server.join()` it hears Ctrl-C
    if job != "ps" and "ps" in spec.jobs:
        servers = {f"/job:ps/task:{k}": spec.task_address("ps", k) for k in spec.task_indices("ps")}
        watch = Watch(servers, ps_timeout)
        _watches.append(watch)
        threading.Thread(target=watch.keep, name="springline-ps-watch", daemon=True).start()
    return Cluster(spec, job, task, server)


def read_config(text: str) -> tuple[Any, str, int]:
    """Parse a `TF_CONFIG`: a `ClusterSpec`, the job of this task, its number in the job.

    >>> read_config('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')[1:]
    ('worker', 0)

    Raises:
        ValueError: it is something else.
    """
    try:
        config = json.loads(text)
        jobs = {job: tasks for job, tasks in config["cluster"].items() if tasks and job in _JOBS}
        spec = tf.train.ClusterSpec(jobs)
        job, task = config["task"]["type"], int(config["task"]["index"])
        spec.task_address(job, task)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"TF_CONFIG cannot be used: {type(error).__name__}: {error}. It must have 'cluster', a "
            "list of addresses for each job, and 'task', the 'type' and the 'index' of this "
            "process. Only a chief, workers and parameter servers (ps) take part in training; to "
            "evaluate beside it, restore what `swapping_saver` saves, in a script without "
            f"`cluster()`. Received: TF_CONFIG={text!r}."
        ) from error
    return spec, job, task


class Watch:
    """Looks whether the parameter servers can be reached, until training ends.

    Args:
        servers: their addresses, by name.
        timeout: seconds that one may be out of reach after it was reached; None for ever.
    """

    def __init__(self, servers: Mapping[str, str], timeout: float | None) -> None:
        self._servers = {n: address for n, address in servers.items() if _parted(address)}
        for name in servers.keys() - self._servers.keys():
            _log.warning("%s at %r has no port, so it is not watched.", name, servers[name])
        self._resting = False
        self._timeout = timeout
        self._start = time.monotonic()
        self._reached: set[str] = set()  # at any time
        self._lost = dict.fromkeys(servers, self._start)  # since when each is out of reach
        self._warned = dict.fromkeys(servers, self._start)

    def keep(self) -> NoReturn:
        """Look for ever, and end the process when one is gone that is needed."""
        while True:
            sentences = [] if self._resting else self.look()
            if sentences and not self._resting:
                _say_last(f"springline: {sentences[0]}")
                os._exit(1)  # the main thread waits in a call that no exception reaches
            time.sleep(_LOOK)

    def answered(self) -> None:
        """Take it from a session that all have been reached, also between two looks."""
        self._reached.update(self._servers)
        self._lost.clear()
        self._resting = False

    def rest(self) -> None:
        """Look no more, until a session is made again."""
        self._resting = True

    def look(self) -> list[str]:
        """Look at each once; return a sentence for each that is gone, warn of those that may be."""
        gone = []
        for name, address in self._servers.items():
            now = time.monotonic()
            if reachable(address):
                self._reached.add(name)
                self._lost.pop(name, None)
                self._warned[name] = now
                continue
            out = now - self._lost.setdefault(name, now)
            if name in self._reached and self._timeout is not None and out >= self._timeout:
                gone.append(
                    f"the parameter server {name} at {address} has been out of reach for "
                    f"{out:.0f} s, and the center with it: this worker ends. Start the cluster "
                    "again; a MonitoredTrainingSession with a `checkpoint_dir` goes on from the "
                    "last checkpoint."
                )
            elif now - self._warned[name] >= _WARN_EVERY:
                self._warned[name] = now
                _log.warning(
                    "The parameter server %s at %s is out of reach since %.0f s.",
                    name,
                    address,
                    out,
                )
        return gone


def servers_answered() -> None:
    """Tell the watch of this process, if there is one, that a session has been made."""
    for watch in _watches:
        watch.answered()


def servers_not_needed() -> None:
    """Tell the watch of this process, if there is one, that training has ended."""
    for watch in _watches:
        watch.rest()


def reachable(address: str) -> bool:
    """Whether somebody listens at a host and port."""
    place = _parted(address)
    if place is None:
        return False
    try:
        with socket.create_connection(place, timeout=_LOOK) as found:
            return bool(found.getsockname() != found.getpeername())  # not by chance ourselves
    except OSError:
        return False


def _say_last(words: str) -> None:
    """Write what the script has printed so far, then the words; do without what is closed."""
    for stream, last in (sys.stdout, ""), (sys.stderr, f"{words}\n"):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.write(last)
            stream.flush()


def _parted(address: str) -> tuple[str, int] | None:
    """Return host and port of an address that has both."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None
