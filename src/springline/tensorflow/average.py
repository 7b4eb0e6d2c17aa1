"""Model averaging on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from springline.center.waiting import wait_until
from springline.rules import ModelAverage, Rule
from springline.tensorflow.getter import ModelAverageCustomGetter
from springline.tensorflow.given import GradsAndVars
from springline.tensorflow.members import Members, wait_in_graph
from springline.tensorflow.optimizer import CenterOptimizer
from springline.tensorflow.rounds import Rounds, since_start
from springline.tensorflow.shards import (
    Call,
    DeviceShard,
    Tensor,
    after,
    all_finite,
    direct,
    refuse_unless,
)
from springline.tensorflow.trio import v1


class ModelAverageOptimizer(CenterOptimizer):
    """Every `interval_steps` steps all workers meet and go on from the mean of their variables.

    Synchronous: a round waits for every worker, but not for those whose session has ended (under
    the hook) until their next one starts. `global_step` counts the rounds. A worker with NaN or Inf
    stays out of that round: it fails, and the others go on.

    Args:
        opt: the optimizer of the local steps, any of `tf.compat.v1.train`.
        num_worker: how many workers there are.
        is_chief: whether this is the chief.
        ma_custom_getter: the getter that the model's variables were made with; None in eager mode.
        interval_steps: τ, local steps between two rounds.
        use_locking: makes no difference: on each server a round is taken part in and closed under a
            lock, whatever it is.
        name: of the operations.
        timeout: seconds after which a round fails and names who is missing. Without it a warning
            names them every 30 seconds.
    """

    getter_type = ModelAverageCustomGetter

    def __init__(
        self,
        opt: Any,
        num_worker: int,
        is_chief: bool,
        ma_custom_getter: ModelAverageCustomGetter | None,
        interval_steps: int = 100,
        use_locking: bool = True,
        name: str = "ModelAverageOptimizer",
        *,
        timeout: float | None = None,
    ) -> None:
        """Wrap an optimizer; the class has what the arguments mean."""
        period = ("interval_steps", interval_steps)
        super().__init__(opt, num_worker, ma_custom_getter, period, use_locking, name, timeout)
        self._is_chief = is_chief
        self._rule = ModelAverage(period=self._period, workers=self._num_worker)
        if not self._eager:
            self._members = Members(self._getter.worker_device, self._num_worker)
        self._rounds: dict[DeviceShard, Rounds] = {}
        self._leave: list[Tensor] = []
        self._come_back: list[Tensor] = []

    def get_init_op(self) -> Any:
        """Return the operation that sets this worker's variables to the center.

        Run it before the first step if you do not use the hook.
        """
        return self._init_op()

    def make_session_run_hook(self) -> Any:
        """Return the hook for `MonitoredTrainingSession`."""
        return self._hook()

    def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Take a local step and, when the period is over, meet the others.

        As with every optimizer here, but a `global_step`, which counts the rounds, is required.
        """
        if global_step is None:
            raise ValueError(
                "Model averaging needs a `global_step`, which counts the rounds: pass "
                "`tf.compat.v1.train.get_or_create_global_step()`."
            )
        return super().apply_gradients(grads_and_vars, global_step, name)

    def _core_rule(self) -> Rule:
        return self._rule

    def _build(self, shards: Sequence[DeviceShard], name: str) -> None:
        for shard in shards:
            self._rounds[shard] = Rounds(shard, self._members, name)

    def _exchange(self, shards: Sequence[DeviceShard], call: Call) -> Tensor:
        number = self._contribute(shards, call)
        first = shards[0]

        def look() -> tuple[Tensor, ...]:
            return tuple(self._reach(first, self._rounds[first].look, [number]))

        with tf.control_dependencies([wait_in_graph(look, self._timeout, "the round")]):
            return self._adopt(shards, call)

    def _own_run(self, shards: Sequence[DeviceShard]) -> Any:
        first, *others = shards
        this = v1.placeholder(tf.int64, [])
        look = direct(first, self._rounds[first].look, [this])
        left = [direct(shard, self._rounds[shard].leave)[0] for shard in others]
        with tf.control_dependencies(left):
            self._leave += direct(first, self._rounds[first].leave)
        back = direct(first, self._rounds[first].come_back)
        with tf.control_dependencies(back):
            back += [direct(shard, self._rounds[shard].come_back)[0] for shard in others]
        self._come_back += back
        return self._contribute(shards, direct), this, look, self._adopt(shards, direct)

    def exchange_in(self, session: Any, exchange: Any, feed: dict[Any, Any]) -> None:
        """Take part in a round, in runs of its own."""
        contribute, number, look, adopt = exchange
        this = session.run(contribute, feed)
        missing: set[str] = set()

        def done() -> bool:
            closed, names = session.run(look, {number: this})
            missing.clear()
            missing.update(name.decode() for name in names)
            return bool(closed)

        wait_until(done, lambda: missing, self._timeout, f"round {since_start(this)}")
        session.run(adopt)

    def start_in(self, session: Any) -> None:
        """Be a member again, if a session before this one has left."""
        session.run(self._come_back)

    def end_in(self, session: Any, options: Any) -> None:
        """Leave, so that the others' rounds go on."""
        session.run(self._leave, options=options)

    def _contribute(self, shards: Sequence[DeviceShard], call: Call) -> Tensor:
        """Push `x`; return the number of the round.

        The first server numbers the rounds for all of them. It is the last to be told, so that what
        is closed there is closed everywhere.
        """
        first, *others = shards
        values = {shard: [trio.local.read_value() for trio in shard.trios] for shard in shards}
        finite = [all_finite(x) for shard in shards for x in values[shard]]
        good = tf.reduce_all(finite)
        (number,) = call(first, self._rounds[first].open)

        def push(shard: DeviceShard) -> list[Tensor]:
            return call(shard, self._rounds[shard].contribute, [number, good, *values[shard]])

        told = [done for shard in others for done in push(shard)]
        with tf.control_dependencies(told):
            told = push(first)
        with tf.control_dependencies(told):  # only now: nobody waits for this worker
            trios = (trio for shard in shards for trio in shard.trios)
            checks = [refuse_unless(f, trio.local) for f, trio in zip(finite, trios, strict=True)]
        with tf.control_dependencies(checks):
            return tf.identity(number)

    def _adopt(self, shards: Sequence[DeviceShard], call: Call) -> Tensor:
        """Pull the mean."""
        return after(
            [
                trio.local.assign(c)
                for shard in shards
                if shard.trios
                for trio, c in zip(shard.trios, call(shard, shard.read), strict=True)
            ]
        )
