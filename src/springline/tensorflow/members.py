"""Who is there, kept on a server: for the barrier before the first step and for rounds.

A hash table of the server maps the name of a task to a number. It needs no initialisation, lives as
long as the server does, and is in no checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from springline.center.waiting import WARN_EVERY, wait_until
from springline.tensorflow.shards import DeviceShard, Tensor, after, direct, only_if
from springline.tensorflow.trio import v1

_raw = tf.raw_ops
FIRST_PAUSE, LONGEST_PAUSE = 50e-6, 5e-3  # seconds


class Table:
    """A table of task names and numbers, on the device of a shard; 0 for names it does not hold."""

    def __init__(self, shard: DeviceShard, name: str) -> None:
        with v1.device(shard.device), tf.control_dependencies(None):
            self._handle = _raw.MutableHashTableV2(
                key_dtype=tf.string, value_dtype=tf.int64, shared_name=f"springline/{name}"
            )

    def __getitem__(self, name: str) -> Tensor:
        zero = tf.constant(0, tf.int64)
        return _raw.LookupTableFindV2(
            table_handle=self._handle, keys=tf.constant(name), default_value=zero
        )

    def put(self, name: Any, value: Any) -> Any:
        """Return the operation that sets a name's number, or those of several."""
        return _raw.LookupTableInsertV2(
            table_handle=self._handle,
            keys=tf.convert_to_tensor(name),
            values=tf.cast(value, tf.int64),
        )

    def all(self) -> tuple[Tensor, Tensor]:
        """Return all names, and their numbers."""
        names, numbers = _raw.LookupTableExportV2(
            table_handle=self._handle, Tkeys=tf.string, Tvalues=tf.int64
        )
        return tf.ensure_shape(names, [None]), tf.ensure_shape(numbers, [None])


class Members:
    """The tasks of the workers, as they are called in messages and tables."""

    def __init__(self, device: str, workers: int) -> None:
        place = v1.DeviceSpec.from_string(device)
        job, task = place.job or "worker", place.task
        if task is None and workers > 1 and job != "chief":
            raise ValueError(
                f"`num_worker` is {workers} and they wait for each other, so each needs a name of "
                "its own: give the getter a `worker_device` with a task, such as "
                f"'/job:worker/task:0'. Received: {device!r}."
            )
        self.task = f"/job:{job}/task:{task or 0}"
        self.workers = workers
        others = [f"/job:{'worker' if job == 'chief' else job}/task:{k}" for k in range(workers)]
        if job == "chief" or _has_chief():
            others = ["/job:chief/task:0", *others[:-1]]
        self.names = others

    def missing(self, names: Tensor, numbers: Tensor, least: Any) -> Tensor:
        """Return the tasks whose number is not yet `least`."""
        all_ = tf.constant(self.names)
        here = tf.equal(names[None], all_[:, None]) & (numbers[None] >= least)
        return tf.boolean_mask(all_, ~tf.reduce_any(here, 1))


def _has_chief() -> bool:
    """Whether the cluster of `TF_CONFIG` has a chief beside its workers."""
    try:
        return bool(json.loads(os.environ["TF_CONFIG"])["cluster"]["chief"])
    except (ValueError, KeyError, TypeError):
        return False


class Barrier:
    """All workers wait for each other, once in the life of the server that holds the table."""

    def __init__(self, members: Members, shard: DeviceShard, name: str) -> None:
        self._members = members
        self._shard = shard
        self._table = Table(shard, f"{name}/barrier")
        with tf.control_dependencies(None):
            self._look = direct(shard, self._arrive)

    def wait_in(self, session: Any, timeout: float | None) -> None:
        """Wait, in runs of a session."""
        missing: list[str] = []

        def done() -> bool:
            started, names = session.run(self._look)
            missing[:] = [name.decode() for name in names]
            return bool(started)

        wait_until(done, lambda: missing, timeout, "all workers to start")

    def wait(self, call: Callable[..., list[Tensor]], timeout: float | None) -> Tensor:
        """Wait, in the graph."""
        return wait_in_graph(
            lambda: tuple(call(self._shard, self._arrive)), timeout, "all workers to start"
        )

    def _arrive(self) -> list[Tensor]:
        """Body: whether all have started, and who is missing."""
        started, workers = "all have started", self._members.workers
        with tf.control_dependencies([self._table.put(self._members.task, 1)]):
            names, numbers = self._table.all()
            done = (tf.size(names) >= workers) | (self._table[started] > 0)
        mark = only_if(done, lambda: after([self._table.put(started, 1)]))
        with tf.control_dependencies([mark]):
            return [tf.identity(done), self._members.missing(names, numbers, 1)]


def wait_in_graph(
    look: Callable[[], tuple[Tensor, ...]], timeout: float | None, what: str
) -> Tensor:
    """Poll, in the graph, until the first of what `look` returns is true.

    The second are the names of those who are missing, for the messages. There are pauses in
    between, which grow as those of `wait_until`.
    """
    start = tf.timestamp()

    def waiting(done: Tensor, *_: Tensor) -> Tensor:
        return ~done if timeout is None else ~done & (tf.timestamp() - start < timeout)

    def again(done: Tensor, missing: Tensor, warn_at: Tensor, seconds: Tensor) -> Any:
        with tf.control_dependencies([pause(seconds)]):
            done, missing = look()
        now = tf.timestamp()

        def warn() -> Tensor:
            words = tf.strings.reduce_join(missing, separator=", ")
            with tf.control_dependencies([tf.print(f"Waiting for {what}; missing:", words)]):
                return now + WARN_EVERY

        warn_at = tf.cond(~done & (now > warn_at), warn, lambda: warn_at)
        return done, missing, warn_at, tf.clip_by_value(seconds * 1.3, FIRST_PAUSE, LONGEST_PAUSE)

    done, missing, *_ = tf.while_loop(
        waiting,
        again,
        [tf.constant(False), tf.constant([], tf.string), start + WARN_EVERY, tf.constant(0.0)],
        shape_invariants=[tf.TensorShape(shape) for shape in ([], [None], [], [])],
        parallel_iterations=1,
    )
    late = f"Waited {timeout} s for {what}; missing:"
    check = tf.debugging.Assert(done, [late, missing, "Are they running?"], summarize=100)
    return after([check])


def pause(seconds: Tensor) -> Tensor:
    """Return something that is there after a time. Unlike Python's it can be cancelled."""
    types = {"output_types": [tf.int64], "output_shapes": [[]]}
    zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
    element = _raw.RangeDataset(start=zero, stop=one, step=one, **types)
    # It pauses before the element, and before its end is found out.
    microseconds = tf.cast(seconds * 0.5e6, tf.int64)
    slow = _raw.SleepDataset(input_dataset=element, sleep_microseconds=microseconds, **types)
    return _raw.DatasetToSingleElement(dataset=slow, **types)[0]
