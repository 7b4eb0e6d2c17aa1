"""The parts of the center, one for each device that holds some of it, and how to reach them.

What happens to a part is a *body*: a function on tensors that runs where the part lives. It can be
called in two ways. *Directly*: its operations are in the graph of the step, on the part's device.
That moves bulk at the speed of the wire, but a run whose graph holds any operation of a parameter
server talks to it, whether or not a condition around it is true. *Remotely*: the body becomes a
function that opens the variables by name, and a single operation on the worker calls it. Then a
step that does not call it never reaches the server.

A part has a lock on its server, which all workers share: its holder takes its turn alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from springline.tensorflow.trio import Trio, Variable, v1

Tensor = Any
_COLLECTIONS = "critical_sections", "critical_section_executions"
Body = Callable[..., list[Tensor]]
Call = Callable[..., list[Tensor]]  # of a shard, a body and its inputs


@dataclass(eq=False)
class DeviceShard:
    """The part of the center on one device."""

    device: str
    trios: list[Trio] = field(default_factory=list)
    counter: Variable | None = None  # the global step, if it lives here

    @property
    def centers(self) -> list[Variable]:
        """Its variables."""
        return [trio.center for trio in self.trios]

    def read(self) -> list[Tensor]:
        """Body: the values of the centers."""
        return [_value(center) for center in self.centers]

    def count(self) -> list[Any]:
        """Body: the global step goes up by one."""
        return [] if self.counter is None else [self.counter.assign_add(1)]


def cut(trios: Sequence[Trio], global_step: Variable | None) -> list[DeviceShard]:
    """Sort variables by the task that holds their centers, the global step among them."""
    shards: dict[str, DeviceShard] = {}

    def at(device: str) -> DeviceShard:
        place = v1.DeviceSpec.from_string(device)
        if place.job:
            device = f"/job:{place.job}/task:{place.task or 0}"  # whatever else it says
        return shards.setdefault(device, DeviceShard(device))

    for trio in trios:
        at(trio.center.device).trios.append(trio)
    if global_step is not None:
        at(global_step.device).counter = global_step
    return list(shards.values())


def direct(shard: DeviceShard, body: Body, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
    """Call a body with its operations in this graph."""
    with v1.device(shard.device):
        return body(*(tf.identity(value) for value in inputs))


def remote(shard: DeviceShard, body: Body, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
    """Call a body by one operation on this device; the shard's stays out of the graph."""
    nothing = tf.constant(0)  # a remote call takes at least one argument
    function, values = detached(lambda _, *given: body(*given), [nothing, *inputs])
    types = [output.dtype for output in function.outputs]
    arguments = [nothing, *inputs, *values]
    replies = tf.raw_ops.RemoteCall(target=shard.device, args=arguments, Tout=types, f=function)
    return _shaped(replies, function)


def detached(
    body: Body, inputs: Sequence[Tensor] = (), inline: bool = True
) -> tuple[Any, list[Tensor]]:
    """Make a function of a body that opens by name whatever resources it uses.

    Args:
        body: what it does.
        inputs: its inputs.
        inline: whether TensorFlow may put its operations in place of a call. In the untaken branch
            of a condition every one of them would cost time.

    Returns:
        the function, and the tensors that it takes after its inputs: values from around the body.
    """
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in inputs]
    inner = _traced(lambda *given: [tf.identity(out) for out in body(*given)], specs)
    captured = inner.captured_inputs
    values = [tensor for tensor in captured if tensor.dtype != tf.resource]
    types = [output.dtype for output in inner.outputs]

    def opened(*given: Tensor) -> list[Tensor]:
        own, rest = given[: len(inputs)], iter(given[len(inputs) :])
        all_ = [_open(t) if t.dtype == tf.resource else next(rest) for t in captured]
        outputs = tf.raw_ops.StatefulPartitionedCall(args=[*own, *all_], Tout=types, f=inner)
        return _shaped(outputs, inner)

    specs += [tf.TensorSpec(value.shape, value.dtype) for value in values]
    return _traced(opened, specs, inline), values


def _traced(body: Callable[..., Any], specs: Sequence[tf.TensorSpec], inline: bool = True) -> Any:
    attributes = {} if inline else {"_noinline": True}
    function = tf.function(body, autograph=False, experimental_attributes=attributes)
    with v1.device(None):  # it runs where it is called
        return function.get_concrete_function(*specs)


def _shaped(outputs: Sequence[Tensor], function: Any) -> list[Tensor]:
    """Give the outputs of a call the shapes that are known of its function's."""
    for output, known in zip(outputs, function.outputs, strict=True):
        output.set_shape(known.shape)
    return list(outputs)


def _open(handle: Tensor) -> Tensor:
    """Return a handle of the same resource, made by an operation that stands here."""
    op = handle.op
    attributes = {key: op.get_attr(key) for key in op.node_def.attr if not key.startswith("_")}
    for key, value in attributes.items():
        if isinstance(value, bytes):
            attributes[key] = value.decode()
    attributes.pop("allowed_devices", None)
    return getattr(tf.raw_ops, op.type)(**attributes)


def _value(variable: Variable) -> Tensor:
    """Read a variable, so that writing it later does not change what was read."""
    value = variable.read_value()
    return value if is_resource(variable) else tf.raw_ops.DeepCopy(x=value)


def is_resource(variable: Variable) -> bool:
    """Whether a variable is a resource; else it is a reference variable."""
    return hasattr(variable, "handle")


def only_if(condition: Tensor, build: Callable[[], Tensor]) -> Tensor:
    """Return 0, or the int32 of what `build` makes, which runs only if the condition holds.

    In a graph, unlike in `tf.cond`, what is built is no function, so that it may hold reference
    variables. In a function TensorFlow itself puts operations in order, which only `tf.cond` bears.
    """
    if v1.get_default_graph().building_function:
        return tf.cond(condition, build, lambda: tf.constant(0))
    off, on = tf.raw_ops.Switch(data=tf.constant(0), pred=condition)
    with tf.control_dependencies([tf.identity(on)]):
        built = tf.identity(build())
    return tf.raw_ops.Merge(inputs=[tf.identity(off), built])[0]


def after(operations: Sequence[Any]) -> Tensor:
    """Return a zero that is there when the operations are done."""
    with tf.control_dependencies(list(operations)):
        return tf.constant(0)


def all_finite(value: Tensor) -> Tensor:
    """Return whether a value is without NaN and Inf.

    The sum of squares, which is fast, tells; where it is too large every element is looked at.
    """

    def look() -> Tensor:
        return tf.reduce_all(tf.math.is_finite(value))

    return tf.cond(tf.math.is_finite(tf.nn.l2_loss(value)), lambda: tf.constant(True), look)


def refuse_unless(finite: Tensor, variable: Variable) -> Tensor:
    """Fail, naming the variable, unless its value is finite."""
    return tf.debugging.check_numerics(
        tf.where(finite, 0.0, float("nan")),
        f"{variable.op.name!r} has NaN or Inf, so it was not sent to the center. Lower the "
        "learning rate, or clip the gradients",
    )


def finite(value: Tensor, variable: Variable) -> Tensor:
    """Return a value that is to be sent; the step fails if it has NaN or Inf."""
    with tf.control_dependencies([refuse_unless(all_finite(value), variable)]):
        return tf.identity(value)


class Turn:
    """A lock on a device, under a name that all workers give."""

    def __init__(self, device: str, name: str) -> None:
        with v1.device(device), tf.control_dependencies(None), _collections_kept():
            self._section = tf.CriticalSection(shared_name=f"springline/{name}")

    def take(self, do: Callable[[], Any]) -> Any:
        """Body: do something while nobody else does."""
        with _collections_kept():
            return self._section.execute(do, exclusive_resource_access=False)


class Turns:
    """A lock on each server."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turns: dict[str, Turn] = {}  # by the shard's device

    def make(self, shards: Sequence[DeviceShard]) -> None:
        """Make the locks of shards; where none is made `take` does without."""
        for device in [shard.device for shard in shards if shard.trios]:
            if device not in self._turns:
                place = device.strip("/").replace("/", "_")
                self._turns[device] = Turn(device, f"{self._name}/turn_{place}")

    def take(self, shard: DeviceShard, do: Body, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Body: do something while nobody else does, once its inputs have come."""
        turn = self._turns.get(shard.device)
        if turn is None:
            return do(*inputs)
        with tf.control_dependencies(inputs):
            return list(turn.take(lambda: do(*inputs)))


@contextmanager
def _collections_kept() -> Iterator[None]:
    """TensorFlow collects its locks; a saver cannot write them in a meta graph, and would warn."""
    graph = v1.get_default_graph()
    before = {key: graph.get_collection(key) for key in _COLLECTIONS}
    yield
    for key, kept in before.items():
        graph.clear_collection(key)
        for one in kept:
            graph.add_to_collection(key, one)
