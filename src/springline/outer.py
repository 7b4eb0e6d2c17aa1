"""Outer optimizers, for `outer=`: what turns the workers' messages into the next center."""

from springline.rules.optimizers import (
    SGD,
    Adagrad,
    Adam,
    BlockMomentum,
    DelayedNesterov,
    Momentum,
    Nesterov,
    SlowMomentum,
)
from springline.rules.outer import Outer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "BlockMomentum",
    "DelayedNesterov",
    "Momentum",
    "Nesterov",
    "Outer",
    "SlowMomentum",
]
