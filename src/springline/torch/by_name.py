"""The optimizer of a rule, by the rule's name."""

from __future__ import annotations

from typing import Any

from springline.torch.diloco import AsyncDiLoCoOptimizer, DiLoCoOptimizer, SlowMoOptimizer
from springline.torch.optimizer import CenterOptimizer
from springline.torch.optimizers import (
    AGNOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
)
from springline.torch.several import Inner

RULES: dict[str, type[CenterOptimizer]] = {
    "elastic": ElasticAverageOptimizer,
    "average": ModelAverageOptimizer,
    "agn": AGNOptimizer,
    "diloco": DiLoCoOptimizer,
    "async_diloco": AsyncDiLoCoOptimizer,
    "slowmo": SlowMoOptimizer,
}


def wrap(rule: str, optimizer: Inner, **options: Any) -> CenterOptimizer:
    """Wrap an optimizer in that of a rule.

    Args:
        rule: "elastic", "average", "agn", "diloco", "async_diloco" or "slowmo".
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        **options: those of the rule's own class.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = wrap("average", torch.optim.SGD(model.parameters(), lr=0.1), model=model, period=5)
    >>> type(opt).__name__
    'ModelAverageOptimizer'
    """
    check_rule(rule)
    return RULES[rule](optimizer, **options)


def check_rule(rule: str) -> None:
    """Refuse what is not the name of a rule."""
    if not isinstance(rule, str) or rule not in RULES:
        names = ", ".join(f'"{name}"' for name in RULES)
        raise ValueError(f"`rule` must be one of {names}. Received: rule={rule!r}.")
