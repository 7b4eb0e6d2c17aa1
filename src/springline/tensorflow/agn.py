"""Accumulated gradient normalization on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import tensorflow as tf

from springline.rules import AGN, Rule
from springline.tensorflow.getter import AGNCustomGetter
from springline.tensorflow.optimizer import CenterOptimizer
from springline.tensorflow.outer import OuterOptimizer, outer_like
from springline.tensorflow.shards import Call, DeviceShard, Tensor, after, finite
from springline.tensorflow.trio import Trio, Variable


class AGNOptimizer(CenterOptimizer):
    """Every `communication_period` steps the mean gradient since then takes a step of the center.

    Asynchronous. The center has an optimizer of its own, of the same kind and settings as the
    worker's; its state is on the servers, shared by all workers and saved with the center.

    Args:
        optimizer: the optimizer of the local steps, any of `tf.compat.v1.train`.
        num_worker: how many workers there are.
        custom_getter: the getter that the model's variables were made with; None in eager mode.
        communication_period: τ, local steps between two exchanges.
        use_locking: whether a step of the center, and the read that follows it, are made under a
            lock, server by server. Without it other workers' steps may come in between.
        name: of the operations.
    """

    getter_type = AGNCustomGetter
    outer: OuterOptimizer

    def __init__(
        self,
        optimizer: Any,
        num_worker: int,
        custom_getter: AGNCustomGetter | None,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
    ) -> None:
        """Wrap an optimizer; the class has what the arguments mean."""
        period = ("communication_period", communication_period)
        super().__init__(optimizer, num_worker, custom_getter, period, use_locking, name, None)
        self.outer = OuterOptimizer(optimizer, use_locking, name)
        if self._eager:
            self._core_rule()  # refuses what it could not do later

    def get_init_op(self, task_index: int) -> Any:
        """Return the operation that sets this worker's variables to the center.

        Run it before the first step if you do not use the hook.
        """
        return self._init_op()

    def make_session_run_hook(self, is_chief: bool, task_index: int) -> Any:
        """Return the hook for `MonitoredTrainingSession`."""
        return self._hook()

    def variables(self) -> list[Variable]:
        """Return all variables of both optimizers' state."""
        return [*super().variables(), *self.outer.variables()]

    def _start(self, trio: Trio, c: Tensor) -> list[Any]:
        return [trio.local.assign(c), _clear(trio)]

    def _observe(self, trained: Sequence[tuple[Any, Trio]]) -> list[Any]:
        """`a ← a + g`."""
        return [_accumulate(trio.beside, g) for g, trio in trained]

    def _core_rule(self) -> Rule:
        outer = outer_like(self._opt)
        return AGN(period=self._period, workers=self._num_worker, outer=outer)

    def _build(self, shards: Sequence[DeviceShard], name: str) -> None:
        super()._build(shards, name)
        self.outer.prepare()

    def _fed(self) -> AbstractContextManager[dict[Any, Tensor]]:
        return self.outer.fed()

    def _exchange(self, shards: Sequence[DeviceShard], call: Call) -> Tensor:
        """Push `a/τ`, pull `c`."""
        raw = {s: [_mean(trio.beside, self._period) for trio in s.trios] for s in shards}
        with tf.control_dependencies([mean for means in raw.values() for mean in means]):
            cleared = [_clear(trio) for shard in shards for trio in shard.trios]
        done = []
        for shard in shards:
            with tf.control_dependencies(cleared):  # all of them, before any check can fail
                means = [finite(a, x.local) for a, x in zip(raw[shard], shard.trios, strict=True)]
            *centers, stepped = call(shard, partial(self._step, shard), means)
            done.append(stepped)
            done += [trio.local.assign(c) for trio, c in zip(shard.trios, centers, strict=True)]
        return after(done)

    def _step(self, shard: DeviceShard, *means: Tensor) -> list[Tensor]:
        """Body: one step of the outer optimizer; return the centers, and a zero."""
        if not shard.trios:
            return [after(shard.count())]

        def take(*means: Tensor) -> list[Tensor]:
            steps = self.outer.step(means, shard.centers)
            with tf.control_dependencies(steps):
                counted = shard.count()
            with tf.control_dependencies([*steps, *counted]):
                return [*map(tf.identity, shard.read()), tf.constant(0)]

        return self._turns.take(shard, take, means)


def _accumulate(a: Variable, g: Any) -> Any:
    if isinstance(g, tf.IndexedSlices):
        return a.scatter_add(g)
    return a.assign_add(tf.cast(g, a.dtype))


def _mean(a: Variable, period: int) -> Tensor:
    """`a/τ`, a value of its own."""
    return a.read_value() / tf.constant(period, a.dtype.base_dtype)


def _clear(trio: Trio) -> Any:
    return trio.beside.assign(tf.zeros_like(trio.beside))
