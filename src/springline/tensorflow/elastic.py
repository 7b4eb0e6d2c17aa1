"""Elastic averaging on parameter servers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from springline.checks import is_number, true_or_false
from springline.rules import ElasticAverage, Rule
from springline.tensorflow.getter import ElasticAverageCustomGetter
from springline.tensorflow.given import GradsAndVars, brief
from springline.tensorflow.members import Barrier, Members
from springline.tensorflow.optimizer import CenterOptimizer
from springline.tensorflow.private import learning_rate_of
from springline.tensorflow.shards import Call, DeviceShard, Tensor, after, direct, finite
from springline.tensorflow.trio import Trio, Variable, v1

# Whose step is as long as the gradient, so that `α / learning_rate` pulls by α.
_LINEAR = (
    v1.train.GradientDescentOptimizer,
    v1.train.MomentumOptimizer,
    v1.train.ProximalGradientDescentOptimizer,
)


class ElasticAverageOptimizer(CenterOptimizer):
    """Every `communication_period` steps worker and center move towards each other.

    Asynchronous. With `x` the worker's variables and `c` their centers: `δ = α(x − c)`, `c` becomes
    `c + δ` and `x` becomes `x − δ`.

    Args:
        opt: the optimizer of the local steps, any of `tf.compat.v1.train`.
        num_worker: how many workers there are.
        ea_custom_getter: the getter that the model's variables were made with; None in eager mode.
        communication_period: τ, local steps between two exchanges.
        moving_rate: α in (0, 1]. The default is `0.9 / τ / num_worker`, as it was in TensorFlow 1;
            the paper's authors use `0.9 / num_worker`, and so does the rest of springline.
        rho: the exploration penalty, `ρ·½‖x − c̃‖²` in the loss, with `c̃` the center as it was at
            the last exchange. It is of all variables that are trained: one without a gradient gets
            `ρ(x − c̃)`, and an embedding's gradient becomes dense, for unused rows are pulled, too.
            The default is α divided by the learning rate. 0 costs nothing, and is advised for
            asynchronous runs.
        use_locking: whether a worker reads all its centers of a server at once, and adds to all of
            them at once, each under a lock of the server that all workers share: no exchange sees
            a part of another's. The lock is not held while anything travels: others may add
            between the read and the add, and `x + c` is conserved all the same. Without it centers
            are read and added to one by one as they come (each addition is whole with resource
            variables; with reference variables two may mix).
        synchronous: whether all workers wait for each other before the first step.
        name: of the operations.
        timeout: seconds to wait for others before the first step, if `synchronous`.
    """

    getter_type = ElasticAverageCustomGetter
    BETA = ElasticAverage.BETA

    def __init__(
        self,
        opt: Any,
        num_worker: int,
        ea_custom_getter: ElasticAverageCustomGetter | None,
        communication_period: int = 10,
        moving_rate: float | None = None,
        rho: Any = None,
        use_locking: bool = True,
        synchronous: bool = False,
        name: str = "ElasticAverageOptimizer",
        *,
        timeout: float | None = None,
    ) -> None:
        """Wrap an optimizer; the class has what the arguments mean."""
        period = ("communication_period", communication_period)
        super().__init__(opt, num_worker, ea_custom_getter, period, use_locking, name, timeout)
        true_or_false("synchronous", synchronous)
        moving_rate, rho = _plain(moving_rate), _plain(rho)
        if tf.is_tensor(moving_rate):
            raise ValueError(
                "`moving_rate` must be a number that is known when the optimizer is made, not a "
                f"tensor. Received: {brief(moving_rate)}."
            )
        default = self.BETA / self._period / self._num_worker
        α = default if moving_rate is None else moving_rate
        if not (is_number(α) and 0 < α <= 1):
            raise ValueError(
                "`moving_rate` must be in (0, 1]: it is the share of the way that worker and "
                f"center move towards each other. Received: moving_rate={moving_rate!r}. Leave it "
                f"out for the default, {self.BETA}/communication_period/num_worker = {default:g}."
            )
        if callable(rho):
            raise TypeError(f"`rho` must be a number or a tensor. Received: {brief(rho)}.")
        # `_penalize` has the value; the rule needs to know only whether there is a penalty.
        known: Any = rho if isinstance(rho, float | int | str) else 1.0
        self._rule = ElasticAverage(
            period=self._period,
            workers=self._num_worker,
            moving_rate=α,
            rho=known,
        )
        self._rho = rho
        if rho is None:
            _check_default(opt, α)
        self._synchronous = synchronous
        if synchronous and not self._eager:
            self._members = Members(self._getter.worker_device, self._num_worker)
        self._barrier: Barrier | None = None

    def get_init_op(self, task_index: int) -> Any:
        """Return the operation that sets this worker's variables to the center.

        Run it before the first step if you do not use the hook.
        """
        init = self._init_op()
        if not self._synchronous:
            return init
        with tf.control_dependencies([init]):
            return self._make_barrier().wait(self._reach, self._timeout).op

    def make_session_run_hook(self, is_chief: bool, task_index: int) -> Any:
        """Return the hook for `MonitoredTrainingSession`."""
        hook = self._hook()
        if self._synchronous:
            self._barrier = self._make_barrier()
        return hook

    def start_in(self, session: Any) -> None:
        """Wait for all workers, once in the life of a center."""
        if self._barrier:
            self._barrier.wait_in(session, self._timeout)

    def _make_barrier(self) -> Barrier:
        return Barrier(self._members, self.first_shard(), self.get_name())

    def _core_rule(self) -> Rule:
        return self._rule

    def _penalize(self, gradients: GradsAndVars, grad_loss: Any) -> list[tuple[Any, Variable]]:
        rho = _default_rho(self._opt, self._rule.alpha) if self._rho is None else self._rho
        if _is_plain(rho) and rho == 0:
            return list(gradients)
        return [(self._pulled(g, v, grad_loss, rho), v) for g, v in gradients]

    def _pulled(self, g: Any, v: Variable, grad_loss: Any, rho: Any) -> Tensor | None:
        """`g + ρ(x − c̃)`, scaled as the loss is."""
        if g is None and not self._getter.has(v) and not self._eager:
            return None  # another model's
        trio = self._trio(v)
        pull = tf.cast(rho, v.dtype) * (v.read_value() - trio.beside.read_value())
        if grad_loss is not None:
            pull *= tf.cast(tf.reduce_mean(grad_loss), v.dtype)
        return pull if g is None else tf.convert_to_tensor(g) + pull

    def _start(self, trio: Trio, c: Tensor) -> list[Any]:
        return [trio.local.assign(c), trio.beside.assign(c)]

    def _exchange(self, shards: Sequence[DeviceShard], call: Call) -> Tensor:
        """Pull `c`, push `δ`."""
        done = []
        for shard in shards:
            centers = call(shard, partial(self._read, shard)) if shard.trios else []
            deltas = [
                finite(
                    (trio.local.read_value() - c) * tf.constant(self._rule.alpha, c.dtype),
                    trio.local,
                )
                for trio, c in zip(shard.trios, centers, strict=True)
            ]
            added = call(shard, partial(self._add, shard), deltas)
            # Directly and without a lock, each δ goes its own way, both sides of it; else all or
            # none do.
            all_ = deltas if self._locking else []
            with tf.control_dependencies(all_ if call is direct else added):
                for trio, c, δ in zip(shard.trios, centers, deltas, strict=True):
                    done += [trio.local.assign_sub(δ), trio.beside.assign(c)]
            done += added
        return after(done)

    def _read(self, shard: DeviceShard) -> list[Tensor]:
        """Body: return the centers."""
        return self._turns.take(shard, shard.read)

    def _add(self, shard: DeviceShard, *deltas: Tensor) -> list[Tensor]:
        """Body: `c ← c + δ`."""

        def add(*deltas: Tensor) -> list[Tensor]:
            sums = [
                c.assign_add(δ, use_locking=self._locking)
                for c, δ in zip(shard.centers, deltas, strict=True)
            ]
            with tf.control_dependencies(sums):
                return [after(shard.count())]

        return self._turns.take(shard, add, deltas)


def _default_rho(opt: Any, α: float) -> Any:
    """Return `α / learning_rate`; 0 where nothing is learned."""
    rate = _plain(learning_rate_of(opt))
    if rate is None:
        raise ValueError(
            f"The default of `rho` is moving_rate / learning_rate, but {type(opt).__name__} has no "
            "learning rate that could be found. Give `rho`; 0.0 is advised for asynchronous runs."
        )
    if _is_plain(rate):
        return α / rate if rate else 0.0
    rate = tf.convert_to_tensor(rate)
    return tf.math.divide_no_nan(tf.cast(α, rate.dtype), rate)


def _check_default(opt: Any, α: float) -> None:
    """Warn if the default of `rho` would keep the model from learning."""
    rho = _default_rho(opt, α)
    if isinstance(opt, _LINEAR) or (_is_plain(rho) and rho == 0):
        return
    number = f" = {α:g} / {α / rho:g} = {rho:g}" if _is_plain(rho) else ""
    warnings.warn(
        f"The default of `rho` is moving_rate / learning_rate{number}, as tf.contrib.opt had it. "
        f"The steps of {type(opt).__name__} do not grow with the gradient, so with such a `rho` "
        "they hardly do anything but stay at the center. Give `rho=0.0`, which is advised for "
        "asynchronous runs.",
        stacklevel=3,
    )


def _is_plain(number: Any) -> bool:
    return isinstance(number, float | int)


def _plain(number: Any) -> Any:
    """Return a number of numpy's as Python's, anything else as it is."""
    return number.item() if isinstance(number, np.generic | np.ndarray) else number
