"""Buffers (BatchNorm's averages), which travel with the center under every rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from springline.rules.average import ModelAverage
from springline.rules.outer import Outer, Replace, Toward
from springline.rules.rule import Rule


def buffer_rule(rule: Rule, rounds: bool) -> Rule:
    """Return the rule for the buffers beside `rule`: their mean where exchanges are rounds."""
    kind = ModelAverage if rounds else BufferAverage
    return kind(period=rule.period, workers=rule.workers)


@dataclass(frozen=True, kw_only=True)
class BufferAverage(ModelAverage):
    """The center follows the workers' buffers `b` and every worker takes it over.

    ```
    c ← c + (b − c)/p      b ← c
    ```
    Alone, `c ← b`, and the worker keeps its own.
    """

    name: ClassVar[str] = "buffers"
    rounds: ClassVar[bool] = False

    @property
    def outer(self) -> Outer:
        """`c ← c + (b − c)/p`."""
        return Replace() if self.follows else Toward(1 / self.workers)
