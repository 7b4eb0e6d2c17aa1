"""This process's place in a cluster: `TF_CONFIG`, from a scheduler or `springline run`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from springline.tensorflow.getter import v1


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
        return self.job == "chief" or (self.task == 0 and "chief" not in self.spec.jobs)

    @property
    def num_worker(self) -> int:
        """How many workers there are, the chief among them."""
        return sum(self.spec.num_tasks(job) for job in self.spec.jobs if job != "ps") or 1

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


def cluster(serve: bool = True) -> Cluster:
    """Return this task's place, with its server started.

    Args:
        serve: whether a parameter server serves here and now; then this does not return.

    Without `TF_CONFIG` it is a process of its own: one worker, no server.
    """
    given = os.environ.get("TF_CONFIG")
    if not given:
        return Cluster(tf.train.ClusterSpec({}), "worker", 0, None)
    try:
        config = json.loads(given)
        jobs, job, task = config["cluster"], config["task"]["type"], int(config["task"]["index"])
        address = jobs[job][task]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            "TF_CONFIG must be JSON with 'cluster' (job → addresses) and 'task' (type, index of "
            f"one of them). Received: {given!r}."
        ) from error
    spec = tf.train.ClusterSpec(jobs)
    try:
        server = tf.distribute.Server(spec, job_name=job, task_index=task)
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"The server of /job:{job}/task:{task} could not listen at {address}: {error.message}. "
            "Is another process using the port?"
        ) from error
    if serve and job == "ps":
        server.join()
    return Cluster(spec, job, task, server)
