"""The algorithms, on numpy arrays; each file reads like its paper."""

from springline.rules.agn import AGN
from springline.rules.average import ModelAverage
from springline.rules.elastic import ElasticAverage
from springline.rules.outer import SGD, Adagrad, Adam, Momentum, Nesterov, Outer
from springline.rules.rule import Rule

__all__ = [
    "AGN",
    "SGD",
    "Adagrad",
    "Adam",
    "ElasticAverage",
    "ModelAverage",
    "Momentum",
    "Nesterov",
    "Outer",
    "Rule",
]
