"""Accumulated gradient normalization on parameter servers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.getter import AGNCustomGetter, Trio, Variable, v1
from springline.tensorflow.optimizer import Call, CenterOptimizer
from springline.tensorflow.shards import Shard, Tensor, after, finite


class AGNOptimizer(CenterOptimizer):
    """Every `communication_period` steps the mean gradient since then takes a step of the center.

    Asynchronous. The center has an optimizer of its own, of the same kind and settings as the
    worker's; its state is on the servers, shared by all workers and saved with the center.

    Args:
        optimizer: the optimizer of the local steps, any of `tf.compat.v1.train`.
        num_worker: how many workers there are.
        custom_getter: the getter that the model's variables were made with.
        communication_period: τ, local steps between two exchanges.
        use_locking: whether a step of the center is made under a lock, server by server.
        name: of the operations.
    """

    getter_type = AGNCustomGetter

    def __init__(
        self,
        optimizer: Any,
        num_worker: int,
        custom_getter: AGNCustomGetter,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
    ) -> None:
        period = ("communication_period", communication_period)
        super().__init__(optimizer, num_worker, custom_getter, period, use_locking, name, None)
        self._outers: dict[int, Any] = {}  # by the shard's id
        self._turns: dict[int, Any] = {}

    def get_init_op(self, task_index: int) -> Any:
        """Return the operation that sets this worker's variables to the center.

        Run it before the first step if you do not use the hook.
        """
        return self._init_op()

    def make_session_run_hook(self, is_chief: bool, task_index: int) -> Any:
        """Return the hook for `MonitoredTrainingSession`."""
        return self._hook(is_chief)

    def variables(self) -> list[Variable]:
        """Return all variables of both optimizers' state."""
        outers = (v for outer in self._outers.values() for v in outer.variables())
        return [*super().variables(), *outers]

    def _start(self, trio: Trio, c: Tensor) -> list[Any]:
        return [trio.local.assign(c), _clear(trio)]

    def _observe(self, trained: Sequence[tuple[Any, Trio]]) -> list[Any]:
        """`a ← a + g`."""
        return [_accumulate(trio.beside, g) for g, trio in trained]

    def _build(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self._outers[id(shard)] = _twin(self._opt, self._locking)
            if self._locking and shard.trios:
                place = shard.device.strip("/").replace("/", "_")
                with v1.device(shard.device):
                    name = f"springline/{self.get_name()}/turn_{place}"
                    self._turns[id(shard)] = tf.CriticalSection(shared_name=name)

    def _exchange(self, shards: Sequence[Shard], call: Call) -> Tensor:
        """Push `a/τ`, pull `c`."""
        done = []
        for shard in shards:
            means = [
                finite(a.read_value() / tf.cast(self._period, a.dtype), trio.local)
                for trio in shard.trios
                for a in [trio.beside]
            ]

            def step(*means: Tensor, shard: Shard = shard) -> list[Tensor]:
                return self._step(shard, means)

            replies = call(shard, step, means)
            done += [*replies[-1:]]
            for trio, c in zip(shard.trios, replies, strict=False):
                done += [trio.local.assign(c)]
            with tf.control_dependencies(replies):
                done += [_clear(trio) for trio in shard.trios]
        return after(done)

    def _step(self, shard: Shard, means: Sequence[Tensor]) -> list[Tensor]:
        """Body: one step of the outer optimizer; return the centers, and a zero."""
        if not shard.trios:
            return [after(shard.count())]

        def take() -> list[Tensor]:
            outer = self._outers[id(shard)]
            step = outer.apply_gradients(list(zip(means, shard.centers, strict=True)))
            with tf.control_dependencies([step, *shard.count()]):
                return [*map(tf.identity, shard.read()), tf.constant(0)]

        turn = self._turns.get(id(shard))
        if turn is None:
            return take()
        with tf.control_dependencies(means):
            return list(turn.execute(take, exclusive_resource_access=False))


def _twin(opt: Any, use_locking: bool) -> Any:
    """Return an optimizer of the same kind and settings, without any state."""
    twin = copy.copy(opt)
    v1.train.Optimizer.__init__(twin, use_locking, opt.get_name())
    return twin


def _accumulate(a: Variable, g: Any) -> Any:
    if isinstance(g, tf.IndexedSlices):
        return a.scatter_add(g)
    return a.assign_add(tf.cast(g, a.dtype))


def _clear(trio: Trio) -> Any:
    a = trio.beside
    return a.assign(tf.zeros(a.shape, a.dtype.base_dtype))
