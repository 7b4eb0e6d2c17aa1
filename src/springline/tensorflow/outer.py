"""AGN's outer optimizer in eager mode: like the inner one, on the center's own arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springline.rules import SGD, Adagrad, Adam, Momentum, Outer
from springline.tensorflow.getter import v1


def rate_of(opt: Any) -> Any:
    """Return the learning rate of one of the optimizers below, as it is now."""
    rate = opt._lr if isinstance(opt, v1.train.AdamOptimizer) else opt._learning_rate
    return rate() if callable(rate) else rate


def outer_like(opt: Any) -> Outer:
    """Return an optimizer for the center, of the same kind and settings."""
    make = _OUTERS.get(type(opt))
    if make is None or getattr(opt, "_use_nesterov", False):
        kind = type(opt).__name__ + (" with `use_nesterov`" if make else "")
        names = ", ".join(known.__name__ for known in _OUTERS)
        raise ValueError(
            f"In eager mode AGN has no optimizer like {kind} for the center. Use one of {names} "
            "(without `use_nesterov`), or another rule."
        )
    return make(opt)


_OUTERS: dict[type, Callable[[Any], Outer]] = {
    v1.train.GradientDescentOptimizer: lambda opt: SGD(_number(rate_of(opt))),
    v1.train.MomentumOptimizer: lambda opt: Momentum(_number(rate_of(opt)), _number(opt._momentum)),
    v1.train.AdagradOptimizer: lambda opt: Adagrad(
        _number(rate_of(opt)), _number(opt._initial_accumulator_value)
    ),
    v1.train.AdamOptimizer: lambda opt: Adam(
        _number(rate_of(opt)), _number(opt._beta1), _number(opt._beta2), _number(opt._epsilon)
    ),
}


def _number(value: Any) -> float:
    return float(value() if callable(value) else value)
