"""Model averaging on parameter servers.

A round, on each server by itself: every worker's variables are added to accumulators, the worker's
name and the number of the round go into a table, and whoever comes last sets the centers to the
means. A worker that was restarted after it had contributed does not contribute twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from springline.center.waiting import wait_until
from springline.rules import ModelAverage, Rule
from springline.tensorflow.getter import ModelAverageCustomGetter, v1
from springline.tensorflow.members import Members, Table, wait_in_graph
from springline.tensorflow.optimizer import Call, CenterOptimizer, GradsAndVars
from springline.tensorflow.shards import Shard, Tensor, after, direct, finite, only_if

_raw = tf.raw_ops
_CLOSED = "rounds closed"


class Rounds:
    """The rounds of one shard."""

    def __init__(self, shard: Shard, members: Members, name: str) -> None:
        self._shard = shard
        self._members = members
        self._table = Table(shard, f"{name}/rounds")
        with v1.device(shard.device):
            self._turn = tf.CriticalSection(shared_name=f"springline/{name}/turn")
            self._sums = [
                _raw.ResourceConditionalAccumulator(
                    dtype=center.dtype.base_dtype,
                    shape=center.shape,
                    shared_name=f"springline/{name}/{center.op.name}",
                )
                for center in shard.centers
            ]

    def contribute(self, *values: Tensor) -> list[Tensor]:
        """Body: take part in the open round, once, and close it if all have. Return its number."""
        with tf.control_dependencies(values):  # so that nobody has the turn while values travel
            here = [tf.identity(value) for value in values]
        with tf.control_dependencies(here):
            number = self._turn.execute(lambda: self._add(here), exclusive_resource_access=False)
        return [number]

    def _add(self, values: Sequence[Tensor]) -> Tensor:
        table, mine = self._table, self._members.task
        number = table[_CLOSED] + 1

        def add() -> Tensor:
            sums = [
                _raw.ResourceAccumulatorApplyGradient(
                    handle=handle, local_step=tf.int64.max, gradient=value
                )
                for handle, value in zip(self._sums, values, strict=True)
            ]
            with tf.control_dependencies(sums):
                return after([table.put(mine, number)])

        with tf.control_dependencies([only_if(table[mine] < number, add)]):
            names, numbers = table.all()
            here = tf.equal(numbers, number) & tf.not_equal(names, _CLOSED)
            count = tf.reduce_sum(tf.cast(here, tf.int32))
        with tf.control_dependencies(
            [only_if(count >= self._members.workers, lambda: self._close(number))]
        ):
            return tf.identity(number)

    def _close(self, number: Tensor) -> Tensor:
        means = [
            center.assign(
                _raw.ResourceAccumulatorTakeGradient(
                    handle=handle, num_required=1, dtype=center.dtype.base_dtype
                )
            )
            for handle, center in zip(self._sums, self._shard.centers, strict=True)
        ]
        with tf.control_dependencies([*means, *self._shard.count()]):
            return after([self._table.put(_CLOSED, number)])

    def look(self, number: Tensor) -> list[Tensor]:
        """Body: whether a round is closed, and who is missing in it."""
        names, numbers = self._table.all()
        return [self._table[_CLOSED] >= number, self._members.missing(names, numbers, number)]


class ModelAverageOptimizer(CenterOptimizer):
    """Every `interval_steps` steps all workers meet and go on from the mean of their variables.

    Synchronous: a round waits for every worker. `global_step` counts the rounds.

    Args:
        opt: the optimizer of the local steps, any of `tf.compat.v1.train`.
        num_worker: how many workers there are.
        is_chief: whether this is the chief.
        ma_custom_getter: the getter that the model's variables were made with; None in eager mode.
        interval_steps: τ, local steps between two rounds.
        use_locking: whether updates of the center are made under a lock.
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
        period = ("interval_steps", interval_steps)
        super().__init__(opt, num_worker, ma_custom_getter, period, use_locking, name, timeout)
        self._is_chief = is_chief
        self._rule = ModelAverage(period=self._period, workers=self._num_worker)
        self._members = Members(self._getter.task, self._num_worker)
        self._rounds: dict[Shard, Rounds] = {}

    def get_init_op(self) -> Any:
        """Return the operation that sets this worker's variables to the center.

        Run it before the first step if you do not use the hook.
        """
        return self._init_op()

    def make_session_run_hook(self) -> Any:
        """Return the hook for `MonitoredTrainingSession`."""
        return self._hook(self._is_chief)

    def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Take a local step and, when the period is over, meet the others.

        Args:
            grads_and_vars: what `compute_gradients` returned.
            global_step: counts the rounds; required.
            name: of the operation; by default the optimizer's.

        Raises:
            TypeError: `grads_and_vars` is malformed.
            ValueError: no variable has a gradient, or there is no global step.
        """
        if global_step is None:
            raise ValueError(
                "Model averaging needs a `global_step`, which counts the rounds: pass "
                "`tf.compat.v1.train.get_or_create_global_step()`."
            )
        return super().apply_gradients(grads_and_vars, global_step, name)

    def _core_rule(self) -> Rule:
        return self._rule

    def _build(self, shards: Sequence[Shard], name: str) -> None:
        for shard in shards:
            self._rounds[shard] = Rounds(shard, self._members, name)

    def _exchange(self, shards: Sequence[Shard], call: Call) -> Tensor:
        waits = []
        for shard, number in zip(shards, self._contribute(shards, call), strict=True):
            look = self._rounds[shard].look

            def ask(shard: Shard = shard, number: Tensor = number, look: Any = look) -> Any:
                return tuple(self._reach(shard, look, [number]))

            waits.append(wait_in_graph(ask, self._timeout, "the round"))
        with tf.control_dependencies(waits):
            return self._adopt(shards, call)

    def _own_run(self, shards: Sequence[Shard]) -> Any:
        numbers = [v1.placeholder(tf.int64, []) for _ in shards]
        looks = [
            direct(shard, self._rounds[shard].look, [number])
            for shard, number in zip(shards, numbers, strict=True)
        ]
        return self._contribute(shards, direct), numbers, looks, self._adopt(shards, direct)

    def exchange_in(self, session: Any, exchange: Any) -> None:
        """Take part in a round, in runs of its own."""
        contribute, numbers, looks, adopt = exchange
        this = session.run(contribute)
        missing: set[str] = set()

        def done() -> bool:
            seen = session.run(looks, dict(zip(numbers, this, strict=True)))
            missing.clear()
            missing.update(name.decode() for _, names in seen for name in names)
            return all(closed for closed, _ in seen)

        wait_until(done, lambda: missing, self._timeout, f"round {this[0]}")
        session.run(adopt)

    def _contribute(self, shards: Sequence[Shard], call: Call) -> list[Tensor]:
        """Push `x`."""
        return [
            call(
                shard,
                self._rounds[shard].contribute,
                [finite(trio.local.read_value(), trio.local) for trio in shard.trios],
            )[0]
            for shard in shards
        ]

    def _adopt(self, shards: Sequence[Shard], call: Call) -> Tensor:
        """Pull the mean."""
        return after(
            [
                trio.local.assign(c)
                for shard in shards
                if shard.trios
                for trio, c in zip(shard.trios, call(shard, shard.read), strict=True)
            ]
        )
