"""What does not go together with a center in `fit`: refused by name, before the first step."""

from __future__ import annotations

from typing import Any

import keras  # type: ignore[import-untyped]

from springline.errors import SettingsError
from springline.rules import Outer
from springline.rules.rule import Rule

_PLAIN = ("_DefaultDistributionStrategy", "DefaultDistributionStrategy", "OneDeviceStrategy")


def check_model(given: Any, model: Any, rule: Rule) -> None:
    """Refuse what replicates or averages the model already, and executions that are too long.

    Args:
        given: what `fit` belongs to; it may be a wrapper of the model.
        model: the Keras model.
        rule: the callback's.
    """
    if given is not model:
        _refuse_replicas(type(given).__name__)
    if distribution := keras.distribution.distribution():
        _refuse_replicas(f"keras.distribution.{type(distribution).__name__}")
    if keras.backend.backend() == "tensorflow":
        strategy = type(model.distribute_strategy).__name__
        if strategy not in _PLAIN:
            _refuse_replicas(f"tf.distribute.{strategy}")
    optimizer = model.optimizer
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if getattr(optimizer, "use_ema", False):
        raise SettingsError(
            f"The optimizer {optimizer.name!r} has `use_ema=True`: Keras puts its moving average "
            "into the model at the end of `fit`, where the center belongs. Leave it out."
        )
    at_once, gap = model.steps_per_execution, rule.gaps().constant
    if gap is not None and at_once > gap:
        raise SettingsError(
            "`steps_per_execution` must not be above the steps between two exchanges "
            f"(period/fragments), {gap}. Received: steps_per_execution={at_once}."
        )


def check_first_epoch(epoch: int) -> None:
    """Refuse a run that begins with another epoch than 0."""
    if epoch:
        raise ValueError(
            "In a run `fit` begins with epoch 0, and after a restart where the rank was. Leave "
            "`initial_epoch` out, and give BackupAndRestore a directory that no earlier run has "
            f"left. Received: initial_epoch={epoch}."
        )


def check_outer(outer: Outer) -> Outer:
    """Return an outer optimizer; refuse anything else."""
    if not isinstance(outer, Outer):
        raise TypeError(
            "`outer` must be one of `springline.outer`, such as `springline.outer.Nesterov(0.7, "
            f"0.9)`. Received: outer={outer!r}."
        )
    return outer


def _refuse_replicas(what: str) -> None:
    raise SettingsError(
        f"The model is in {what}, which trains copies of one model by itself; springline's "
        "workers are processes with a whole model each. Use one of the two: under `springline "
        "run` every worker makes its model without it."
    )
