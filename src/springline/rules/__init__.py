"""The algorithms, on numpy arrays; each file reads like its paper."""

from springline.rules.agn import AGN
from springline.rules.average import ModelAverage
from springline.rules.diloco import AsyncDiLoCo, DiLoCo, SlowMo
from springline.rules.elastic import ElasticAverage
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
from springline.rules.rule import Rule

__all__ = [
    "AGN",
    "SGD",
    "Adagrad",
    "Adam",
    "AsyncDiLoCo",
    "BlockMomentum",
    "DelayedNesterov",
    "DiLoCo",
    "ElasticAverage",
    "ModelAverage",
    "Momentum",
    "Nesterov",
    "Outer",
    "Rule",
    "SlowMo",
    "SlowMomentum",
]
