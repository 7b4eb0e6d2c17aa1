"""The hook for `MonitoredTrainingSession`: start from the center, exchange, join what is alive."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from springline.progress import note_worker
from springline.tensorflow.cluster import servers_answered, servers_not_needed
from springline.tensorflow.getter import v1
from springline.tensorflow.members import Table, pause
from springline.tensorflow.saver import JoiningSaver
from springline.tensorflow.shards import after, direct, only_if

if TYPE_CHECKING:
    from springline.tensorflow.optimizer import CenterOptimizer
    from springline.tensorflow.step import Step

_log = logging.getLogger("springline")
PATIENCE = 20.0  # seconds that a worker waits for the chief before TensorFlow's own, longer pause
PAUSE = 0.1
FAREWELL = 10.0  # seconds for the servers to hear that this worker ends


class CenterHook(v1.train.SessionRunHook):
    """Made by `make_session_run_hook`.

    The exchange is a run of its own after the run that made it due, which is the fastest way.
    """

    start_step = 0  # with `local_step`: what `springline.log` counts
    local_step = 0

    def __init__(self, optimizer: CenterOptimizer, is_chief: bool) -> None:
        self._optimizer = optimizer
        self._is_chief = is_chief
        self._reached: dict[tuple[str, ...], list[Step]] = {}  # by what is fetched

    def begin(self) -> None:
        """Add what the session needs to the graph."""
        self._init = self._optimizer._init_op()
        self._ready = Ready(self._optimizer)
        keys, variables = v1.GraphKeys, v1.global_variables()
        if self._is_chief:
            if not v1.get_collection(keys.INIT_OP):
                v1.add_to_collection(keys.INIT_OP, initialize_new(variables))
            if not v1.get_collection(keys.SAVERS):
                centers = [trio.center for trio in self._optimizer._getter.trios()]
                alive = tf.reduce_all([v1.is_variable_initialized(c) for c in centers])
                outer = self._optimizer.outer_variables()
                saver = JoiningSaver(alive, outer, sharded=True, allow_empty=True)
                v1.add_to_collection(keys.SAVERS, saver)
        elif not v1.get_collection(keys.READY_FOR_LOCAL_INIT_OP):
            v1.add_to_collection(keys.READY_FOR_LOCAL_INIT_OP, self._ready.missing())

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Start from the center."""
        session.run([self._init, self._ready.mark] if self._is_chief else self._init)
        note_worker(self)
        servers_answered()
        self._optimizer.start_in(session)

    def before_run(self, run_context: Any) -> Any:
        """Ask which local step a run ends with, if it makes one."""
        steps = self._steps_in(run_context)
        if not steps:
            return None
        counts = [step.count for step in steps]
        return v1.train.SessionRunArgs(counts, {step.exchanged: 0 for step in steps})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Exchange if it is due."""
        if run_values.results is None:
            return
        steps = self._steps_in(run_context)
        for step, count in zip(steps, run_values.results, strict=True):
            self.local_step = int(count)
            if count % self._optimizer._period == 0:
                self._optimizer.exchange_in(run_context.session, step.exchange)

    def end(self, session: Any) -> None:
        """Leave the center. Whether its servers live does not matter any more."""
        options = v1.RunOptions(timeout_in_ms=int(FAREWELL * 1000))
        try:
            self._optimizer.end_in(session, options)
        except tf.errors.OpError as error:
            _log.warning("Could not report to the servers that this worker ends: %s", error.message)
        servers_not_needed()

    def _steps_in(self, run_context: Any) -> list[Step]:
        """Return the local steps that a run makes."""
        graph = run_context.session.graph
        fetches = tf.nest.flatten(run_context.original_args.fetches, expand_composites=True)
        elements = [graph.as_graph_element(fetch) for fetch in fetches]
        key = tuple(element.name for element in elements)
        if key not in self._reached:
            operations = _ancestors(elements)
            self._reached[key] = [s for s in self._optimizer._steps if s.count.op in operations]
        return self._reached[key]


def initialize_new(variables: Sequence[Any]) -> Any:
    """Return an operation that initialises those variables that are not."""

    def unless_initialized(v: Any) -> Any:
        is_new = ~v1.is_variable_initialized(v)
        return only_if(is_new, lambda: after([v1.assign(v, v.initial_value)]))

    return tf.group(*map(unless_initialized, variables))


class Ready:
    """A mark on a server that the chief has made the center; workers wait for it.

    TensorFlow's own workers look for the center's variables every 30 seconds.
    """

    def __init__(self, optimizer: CenterOptimizer) -> None:
        self._shard = optimizer.first_shard()
        self._call = optimizer._reach
        self._table = Table(self._shard, f"{optimizer.get_name()}/ready")
        self.mark = direct(self._shard, lambda: [after([self._table.put("center", 1)])])

    def missing(self) -> Any:
        """Return the names of the variables that are not initialised, after waiting for them."""
        most = int(PATIENCE / PAUSE)

        def look(tries: Any, _: Any) -> Any:
            seconds = tf.where(tries > 0, PAUSE, 0.0)  # not before the first look
            with tf.control_dependencies([pause(seconds)]):
                return tries + 1, self._call(self._shard, lambda: [self._table["center"]])[0]

        ready = tf.constant(0, tf.int64)
        loop = tf.while_loop(lambda t, ready: (t < most) & (ready < 1), look, [0, ready])
        with tf.control_dependencies(loop):
            return v1.report_uninitialized_variables(v1.global_variables())


def _ancestors(elements: Any) -> set[Any]:
    """Return all operations that these depend on."""
    todo = [element if isinstance(element, tf.Operation) else element.op for element in elements]
    seen = set(todo)
    while todo:
        op = todo.pop()
        for other in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen
