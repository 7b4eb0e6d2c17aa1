"""What the three optimizers share: the local step, when an exchange is due, and how it is reached.

A rule writes its exchange once, in `_exchange`, with a `call` that reaches a part of the center
directly or remotely (see shards.py). The operation of `apply_gradients` exchanges within the step,
remotely; the hook, which makes the exchange a run of its own, directly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import tensorflow as tf

from springline.checks import at_least_one, is_number, true_or_false
from springline.rules.rule import Rule
from springline.tensorflow.eager import EagerCenter
from springline.tensorflow.getter import CustomGetter
from springline.tensorflow.given import (
    GradsAndVars,
    brief,
    check_mode,
    checked,
    counter,
    no_meaning,
    trained,
)
from springline.tensorflow.hook import CenterHook
from springline.tensorflow.living import keep_living
from springline.tensorflow.outer import OuterOptimizer
from springline.tensorflow.saver import SwappingSaver
from springline.tensorflow.shards import Body, Call, DeviceShard, Tensor, Turns, cut, direct
from springline.tensorflow.start import Start
from springline.tensorflow.step import (
    StartNote,
    Step,
    exchange_if,
    local_variables,
    reach,
    refuse_branches,
    refuse_private_counter,
    step_counter,
)
from springline.tensorflow.trio import Trio, Variable, v1
from springline.tensorflow.wrapper import WrappingOptimizer

_in_graphs: WeakValueDictionary[int, CenterOptimizer] = WeakValueDictionary()  # by id


class CenterOptimizer(WrappingOptimizer):
    """An optimizer that wraps another, and now and then exchanges with the center."""

    getter_type: ClassVar[type[CustomGetter]]
    outer: OuterOptimizer | None = None  # the center's optimizer, if the rule has one
    _synchronous: bool | None = None  # whether all wait before the first step; None: the rule knows

    def __init__(
        self,
        opt: Any,
        num_worker: int,
        getter: CustomGetter | None,
        period: tuple[str, int],
        use_locking: bool,
        name: str,
        timeout: float | None,
    ) -> None:
        super().__init__(opt, use_locking, name)
        at_least_one("num_worker", num_worker, "It is the number of workers of the cluster.")
        true_or_false("use_locking", use_locking)
        at_least_one(*period, "It is the number of local steps between two exchanges.")
        eager = v1.executing_eagerly_outside_functions()
        if not eager:
            refuse_branches()
        if getter is None and eager:
            getter = self.getter_type("")
        if not isinstance(getter, self.getter_type):
            raise TypeError(
                f"{type(self).__name__} needs the {self.getter_type.__name__} that the model's "
                f"variables were made with. Received: {brief(getter)}."
            )
        if timeout is not None and not (is_number(timeout) and timeout > 0):
            raise ValueError(f"`timeout` must be a number of seconds > 0. Received: {timeout!r}.")
        self._num_worker = int(num_worker)
        self._getter = getter
        self._period = int(period[1])
        self._locking = use_locking
        self._timeout = timeout
        self._steps: list[Step] = []
        self._loaded: dict[Any, tuple[Trio, Tensor]] = {}  # whether each variable is initialised
        self.started: Start | None = None  # by its first hook
        self._turns = Turns(self.get_name())
        self._eager = EagerCenter(self, num_worker) if eager else None
        self._local_step = step_counter(getter.worker_device)
        if not eager:
            self._note = StartNote(getter.worker_device, self._local_step.op.name)
            _in_graphs[id(self)] = self

    def of_this_graph(self) -> list[CenterOptimizer]:
        """Return all optimizers of its graph, itself among them, in the order they were made."""
        return optimizers_of(self._local_step.graph)

    def whether_loaded(self, session: Any) -> tuple[list[Trio], list[bool]]:
        """Return what it trains, and whether the worker's variables are initialised yet."""
        found = self._loaded.values()
        return [trio for trio, _ in found], session.run([loaded for _, loaded in found])

    def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Take a local step and, when the period is over, exchange with the center.

        Args:
            grads_and_vars: what `compute_gradients` returned.
            global_step: counts the exchanges.
            name: of the operation; by default the optimizer's.

        Returns:
            an operation that does all this by itself; in eager mode a tensor, whether it
            exchanged.

        Raises:
            TypeError: `grads_and_vars` is malformed, or `global_step` is no variable.
            ValueError: no variable has a gradient, or one was not made through the getter.
        """
        check_mode(self._eager is not None)
        pairs, global_step = checked(grads_and_vars), counter(global_step)
        if self._eager:
            self._eager.attach(v for _, v in pairs)
            return self._eager.step(trained(pairs, self._eager.trio), global_step)
        refuse_branches()
        found = trained(pairs, self._getter.trio)
        trios = [trio for _, trio in found]
        shards, worker = cut(trios, global_step), self._getter.worker_device
        with tf.control_dependencies(None):
            for trio in trios:
                loaded = tf.identity(v1.is_variable_initialized(trio.local))
                self._loaded[trio.local.ref()] = trio, loaded
        if self._num_worker > 1:
            refuse_private_counter(shards, worker)
        # Each train operation has its own count; most often there is but one.
        local_step = step_counter(worker) if self._steps else self._local_step
        with v1.name_scope(name or self.get_name()) as scope, v1.device(worker):
            with local_variables(worker):
                update = self._opt.apply_gradients([(g, trio.local) for g, trio in found])
            with tf.control_dependencies([update, *self._observe(found)]):
                count = tf.identity(local_step.assign_add(1))
            # Not by the scope, which may differ from worker to worker.
            self._build(shards, f"{self.get_name()}/{trios[0].center.op.name}")
            with tf.control_dependencies(None), self._fed() as feeds:
                exchange = self._own_run(shards)
            # Free of what `apply_gradients` was called under: `count` comes after all of that.
            with tf.control_dependencies(None), tf.control_dependencies([count]):
                due = tf.equal(count % self._period, 0)
                exchanged = exchange_if(due, shards, self._exchange, self._reach, self._note)
            self._steps.append(Step(count, exchanged, exchange, feeds))
            late = self.outer.variables() if self.outer else []  # the centers are kept already
            keep_living([*late, *([] if global_step is None else [global_step])], worker)
            # Not an identity, which TensorFlow would leave out: then feeding would not prune.
            return tf.group(count, tf.raw_ops.DeepCopy(x=exchanged), name=scope)

    def _init_op(self) -> Any:
        """Return the operation that sets every variable of the worker to the center."""
        if self._eager:
            raise no_meaning("get_init_op")
        with v1.name_scope(f"{self.get_name()}_init"), tf.control_dependencies(None):
            done = [self._note.note()]
            for shard in cut(self._getter.trios(), None):
                for trio, c in zip(shard.trios, direct(shard, shard.read), strict=True):
                    done += self._start(trio, c)
            return tf.group(*done)

    def swapping_saver(
        self, var_list: Any = None, name: str = "swapping_saver", **kwargs: Any
    ) -> SwappingSaver:
        """Return a saver that saves the center under the names of the model's own variables.

        Args:
            var_list: what to save, as for `tf.compat.v1.train.Saver`; by default all trainable
                variables that there are.
            name: of the saver.
            **kwargs: of `tf.compat.v1.train.Saver`.

        Raises:
            RuntimeError: no variable was made through the getter yet, or in eager mode.
        """
        if self._eager:
            raise no_meaning("swapping_saver")
        trios = self._getter.trios()
        if not trios:
            raise RuntimeError(
                "There is no center to save: no trainable variable was made through the "
                f"{self.getter_type.__name__}. Make the model first."
            )
        centers = {trio.local.ref(): trio.center for trio in trios}
        return SwappingSaver(var_list, centers, name=name, **kwargs)

    def finish(self) -> None:
        """In eager mode, exchange what the last period left over, and leave the center.

        A normal exit of the script does so, too.
        """
        self._own_center("finish", "the session's end is the end").finish()

    def final(self, timeout: float | None = None) -> bool:
        """In eager mode, finish, wait for all others; whether this worker is to report.

        Args:
            timeout: seconds after which waiting fails, naming who is missing.
        """
        return self._own_center("final", "the chief reports").final(timeout)

    def save_center(self, path: str | Path, model: Any = None) -> None:
        """In eager mode, write the center as safetensors, under the variables' names.

        Args:
            path: of the file.
            model: a Keras model or a `tf.Module`. Its variables that are not in the center, such as
                the statistics of BatchNorm, are written as this worker has them.
        """
        self._own_center("save_center", "`swapping_saver` saves the center").save_center(
            path, model
        )

    def _own_center(self, method: str, instead: str) -> EagerCenter:
        if self._eager is None:
            raise RuntimeError(f"`{method}` is for eager mode; in a graph {instead}.")
        return self._eager

    def _trio(self, variable: Variable) -> Trio:
        """Return what belongs to a variable of the worker."""
        return (self._eager or self._getter).trio(variable)

    # What the rules do differently.

    @abstractmethod
    def _core_rule(self) -> Rule:
        """Return the rule for a center of springline's own, in eager mode."""

    def _observe(self, trained: Sequence[tuple[Any, Trio]]) -> list[Any]:
        """Return operations that see the gradients of a step."""
        return []

    def _build(self, shards: Sequence[DeviceShard], name: str) -> None:
        """Make what the rule keeps on the shards, under a name that no other step has."""
        if self._locking:
            self._turns.make(shards)

    def _start(self, trio: Trio, c: Tensor) -> list[Any]:
        """Return the operations that set a variable to the center."""
        return [trio.local.assign(c)]

    @abstractmethod
    def _exchange(self, shards: Sequence[DeviceShard], call: Call) -> Tensor:
        """Return a tensor that is there when an exchange is done."""

    def _own_run(self, shards: Sequence[DeviceShard]) -> Any:
        """Return what `exchange_in` needs for an exchange in runs of its own."""
        return self._exchange(shards, direct)

    def _fed(self) -> AbstractContextManager[dict[Any, Tensor]]:
        """Whatever is built here is fed the values of a step; return them by placeholder."""
        return nullcontext({})

    def exchange_in(self, session: Any, exchange: Any, feed: dict[Any, Any]) -> None:
        """Exchange in runs of its own, with the values of the step."""
        session.run(exchange, feed)

    def start_in(self, session: Any) -> None:
        """Wait for others before the first step, if the rule does."""

    def end_in(self, session: Any, options: Any) -> None:
        """Leave the center at the end of a session, if the rule has to."""

    def _reach(self, shard: DeviceShard, body: Body, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Call remotely what is on another task."""
        return reach(self._getter.worker_device, shard, body, inputs)

    def first_shard(self) -> DeviceShard:
        """Return the shard of the first center, which is the same for every worker."""
        return cut(self._getter.trios(), None)[0]

    def _hook(self) -> CenterHook:
        if self._eager:
            raise no_meaning("make_session_run_hook")
        return CenterHook(self)


def optimizers_of(graph: tf.Graph) -> list[CenterOptimizer]:
    """Return all optimizers of a graph, in the order they were made."""
    return [each for each in _in_graphs.values() if each._local_step.graph is graph]
