"""How a session starts: which variables it initialises, and which it waits for.

The center is made by the first session that is chief, which marks it as made if it has the hook;
every later one joins it, whatever it is told (see sessions.py). Of the other global variables a
worker initialises by itself those on its own device, which no chief can, and waits for the rest. A
moving average of the worker's variables starts from the center: it is initialised only once they
are set to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from springline.tensorflow.living import initialize_new
from springline.tensorflow.members import Table, pause
from springline.tensorflow.saver import OlderSaver
from springline.tensorflow.sessions import own_variables
from springline.tensorflow.shards import Tensor, after, direct, only_if
from springline.tensorflow.trio import Variable, v1

if TYPE_CHECKING:
    from springline.tensorflow.optimizer import CenterOptimizer

PATIENCE = 20.0  # seconds that a worker waits for the chief before TensorFlow's own, longer pause
PAUSE = 0.1


class Start:
    """What a session runs to start, in the graph's collections.

    What the script has put there by itself, or gives its `Scaffold`, is used instead. If the graph
    has several optimizers, the first hook starts the session for all of them.
    """

    def __init__(self, optimizer: CenterOptimizer) -> None:
        keys, variables = v1.GraphKeys, v1.global_variables()
        all_ = optimizer.of_this_graph()
        centers = [trio.center for each in all_ for trio in each._getter.trios()]
        outers = [each.outer for each in all_ if each.outer]
        shared = [*centers, *(v for outer in outers for v in outer.variables())]
        own, late = own_variables(v1.get_default_graph())
        own = _without(own, shared)
        others = _without(variables, own)
        mark = Mark(optimizer)
        self._joined: weakref.ref[Any] | None = None  # the last session
        self._init = [each._init_op() for each in all_]
        self._after = initialize_new(own)
        self._mark, self._made = mark.put(), mark.made()
        self.initialize_new = initialize_new(_without(variables, late))
        if not v1.get_collection(keys.INIT_OP):
            v1.add_to_collection(keys.INIT_OP, self.initialize_new)
        if not v1.get_collection(keys.SAVERS):
            saver = OlderSaver(outers, sharded=True, allow_empty=True)
            v1.add_to_collection(keys.SAVERS, saver)
        if not v1.get_collection(keys.READY_FOR_LOCAL_INIT_OP):
            v1.add_to_collection(keys.READY_FOR_LOCAL_INIT_OP, mark.missing(others))
        if own and not v1.get_collection(keys.READY_OP):
            needed = [*others, *v1.local_variables()]
            v1.add_to_collection(keys.READY_OP, v1.report_uninitialized_variables(needed))

    def join(self, session: Any) -> None:
        """Set the worker to the center, and then what may start from the worker's variables."""
        if self._joined is None or self._joined() is not session:
            session.run(self._init)
            session.run(self._after)
            self._joined = weakref.ref(session)

    def mark(self, session: Any) -> None:
        """Mark the center as made: a chief has started."""
        session.run(self._mark)

    def is_marked(self, session: Any) -> bool:
        """Whether a chief has started since the servers have."""
        return bool(session.run(self._made))


class Mark:
    """A mark on a server that the center is made; workers wait for it.

    TensorFlow's own workers look for the center's variables every 30 seconds.
    """

    def __init__(self, optimizer: CenterOptimizer) -> None:
        self._shard = optimizer.first_shard()
        self._call = optimizer._reach
        self._table = Table(self._shard, f"{optimizer.get_name()}/ready")

    def put(self) -> Tensor:
        """Return a tensor that is there when the mark is."""
        return direct(self._shard, lambda: [after([self._table.put("center", 1)])])[0]

    def made(self) -> Tensor:
        """Return whether the mark is there."""
        return direct(self._shard, lambda: [self._table["center"] > 0])[0]

    def missing(self, variables: Sequence[Variable]) -> Any:
        """Return the names of those that are not initialised, after waiting for them.

        It fails if the center is made and they are not: then nobody will initialise them.
        """
        most = int(PATIENCE / PAUSE)
        now = v1.report_uninitialized_variables(variables)

        def wait() -> Tensor:
            return tf.while_loop(lambda t, made: (t < most) & (made < 1), look, [0, zero])[1]

        def look(tries: Any, _: Any) -> Any:
            seconds = tf.where(tries > 0, PAUSE, 0.0)  # not before the first look
            with tf.control_dependencies([pause(seconds)]):
                return tries + 1, self._call(self._shard, lambda: [self._table["center"]])[0]

        zero = tf.constant(0, tf.int64)
        made = tf.cond(tf.size(now) > 0, wait, lambda: zero)
        with tf.control_dependencies([made]):
            missing = v1.report_uninitialized_variables(variables)
        reported = only_if(tf.size(missing) > 0, lambda: after([_report(made, missing)]))
        with tf.control_dependencies([reported]):
            return tf.identity(missing)


def _report(made: Tensor, missing: Tensor) -> Any:
    """Print what a worker waits for; fail if it would wait for ever."""
    names = tf.strings.reduce_join(missing, separator=", ")
    never = tf.debugging.Assert(
        made < 1,
        [
            "The chief has made the center without these variables, and nobody initialises them:",
            names,
            "All workers must build the same graph. What only some of them have belongs on their "
            "own device, `with tf.compat.v1.device(worker_device)`.",
        ],
    )
    with tf.control_dependencies([never]):
        return tf.print("springline: waiting for the chief to initialise", names)


def _without(variables: Sequence[Variable], left_out: Sequence[Variable]) -> list[Variable]:
    refs = {v.ref() for v in left_out}
    return [v for v in variables if v.ref() not in refs]
