"""A local step in a graph, and the exchange that it makes when it is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from springline.tensorflow.members import Table
from springline.tensorflow.private import inside_old_control_flow
from springline.tensorflow.shards import (
    Body,
    Call,
    DeviceShard,
    Tensor,
    after,
    detached,
    direct,
    is_resource,
    only_if,
    remote,
)
from springline.tensorflow.trio import Variable, v1

_GIVEN = ("Placeholder", "PlaceholderWithDefault", "IteratorGetNext")  # by a run


@dataclass
class Step:
    """What one call of `apply_gradients` has built."""

    count: Tensor  # the local step, after it was counted
    exchanged: Tensor  # fed by the hook, so that the run is without the exchange
    exchange: Any  # what the hook runs
    feeds: dict[Any, Tensor]  # by what is fed then, what the step computes

    @cached_property
    def stands_alone(self) -> bool:
        """Whether the exchange needs nothing that a run of its own does not have.

        An optimizer of the user's may read a placeholder or an iterator as it applies gradients.
        """
        if not isinstance(self.exchange, tf.Tensor | tf.Operation):
            return True
        fed = {placeholder.op for placeholder in self.feeds}
        return not any(op.type in _GIVEN and op not in fed for op in ancestors([self.exchange]))


def step_counter(worker_device: str) -> Variable:
    """Return a variable that counts local steps, on the worker."""
    with v1.device(worker_device), tf.control_dependencies(None):
        return v1.Variable(
            tf.zeros([], tf.int64),
            trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
            name="local_step",
        )


class StartNote:
    """A note on the worker that it was set to the center; it needs no initialisation."""

    def __init__(self, worker_device: str, name: str) -> None:
        self._table = Table(DeviceShard(worker_device), f"{name}/start")

    def note(self) -> Any:
        """Return the operation that notes it."""
        return self._table.put("noted", 1)

    def warn(self) -> Tensor:
        """Warn, once, if it was not noted."""

        def say() -> Tensor:
            words = (
                "springline: a worker exchanges with the center, but was not set to it before. Use "
                "the hook of `make_session_run_hook`, or run what `get_init_op` returns before the "
                "first step; else each worker starts from values of its own."
            )
            return after([tf.print(words), self.note()])

        return only_if(self._table["noted"] < 1, say)


@contextmanager
def local_variables(worker_device: str) -> Iterator[None]:
    """Whatever is made here is local to the worker; nobody else waits for it."""

    def local(next_creator: Any, **kwargs: Any) -> Variable:
        kwargs |= {"collections": [v1.GraphKeys.LOCAL_VARIABLES], "trainable": False}
        with v1.device(worker_device):
            return next_creator(**kwargs)

    with v1.variable_creator_scope(local):
        yield


def reach(
    worker_device: str, shard: DeviceShard, body: Body, inputs: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Call remotely what is on another task than the worker."""
    call = remote if is_elsewhere(shard.device, worker_device) else direct
    return call(shard, body, inputs)


def is_elsewhere(device: str, worker_device: str) -> bool:
    """Whether a device is of another task than the worker."""
    here, there = map(v1.DeviceSpec.from_string, (worker_device, device))
    return bool(there.job and (there.job, there.task) != (here.job, here.task))


def ancestors(elements: Iterable[Any]) -> set[Any]:
    """Return all operations that these tensors and operations depend on, and their own."""
    todo = [element if isinstance(element, tf.Operation) else element.op for element in elements]
    seen = set(todo)
    while todo:
        op = todo.pop()
        for other in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def refuse_private_counter(shards: Sequence[DeviceShard], worker_device: str) -> None:
    """Raise an error for a global step on the worker, which the others could not see."""
    job = v1.DeviceSpec.from_string(worker_device).job
    counters = [shard.counter for shard in shards if shard.counter is not None]
    centers = {v1.DeviceSpec.from_string(shard.device).job for shard in shards if shard.trios}
    for counter in counters:
        if job and job not in centers and not is_elsewhere(counter.device, worker_device):
            raise ValueError(
                f"{counter.name!r} is on {counter.device or worker_device}, this worker's own "
                "device, where the other workers cannot count with it. Make it on the servers, "
                "before anything else asks for it: call `get_or_create_global_step()` inside "
                "`with tf.compat.v1.device(replica_device_setter(...))`."
            )


def exchange_if(
    due: Tensor,
    shards: Sequence[DeviceShard],
    exchange: Callable[[Sequence[DeviceShard], Call], Tensor],
    far: Call,
    note: StartNote,
) -> Tensor:
    """Exchange if it is due, without touching the servers if it is not.

    From a function a shard is reached by `far`.
    """

    def alone(call: Call) -> Tensor:
        with tf.control_dependencies([note.warn()]):
            return exchange(shards, call)

    variables = [v for s in shards for trio in s.trios for v in trio]
    variables += [s.counter for s in shards]
    if not all(is_resource(v) for v in variables if v is not None):
        # A function cannot open reference variables, so they are in the graph.
        return only_if(due, lambda: alone(direct))
    function, values = detached(lambda: [alone(far)], inline=False)

    def called() -> Tensor:
        return tf.raw_ops.StatefulPartitionedCall(args=values, Tout=[tf.int32], f=function)[0]

    return only_if(due, called)


def refuse_branches() -> None:
    """Raise an error inside `tf.cond`, a loop or a function of a graph."""
    graph = v1.get_default_graph()
    if graph.building_function or inside_old_control_flow(graph):
        raise RuntimeError(
            "An optimizer cannot be made, and `apply_gradients` cannot be called, inside "
            "`tf.cond`, `tf.while_loop` or a `tf.function` of a graph: hooks and other workers "
            "could not reach the exchange in it. Do both outside, and run what `apply_gradients` "
            "returns when a step is to be taken; `compute_gradients` may be anywhere."
        )
