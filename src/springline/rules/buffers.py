"""Buffers (BatchNorm's averages), which travel with the center under every rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from springline.rules.average import ModelAverage
from springline.rules.outer import Outer, Replace, Toward
from springline.rules.rule import Array, Rule


def buffer_rule(rule: Rule, rounds: bool) -> Rule:
    """Return the rule for the buffers beside `rule`: their mean where exchanges are rounds."""
    kind = ModelAverage if rounds else BufferAverage
    return kind(period=rule.period, workers=rule.workers)


@dataclass(frozen=True, kw_only=True)
class BufferAverage(Rule):
    """The center follows the workers' buffers `b` and every worker takes it over.

    ```
    c ← c + (b − c)/p      b ← c
    ```
    Alone, `c ← b`, and the worker keeps its own.
    """

    name: ClassVar[str] = "buffers"

    @property
    def outer(self) -> Outer:
        """`c ← c + (b − c)/p`."""
        return Replace() if self.follows else Toward(1 / self.workers)

    @property
    def follows(self) -> bool:
        """The buffers of one worker are its own."""
        return self.workers == 1

    def contribute(self, x: Array, a: Array, base: Array, n: int, out: Array) -> Array:
        """Return `b` itself."""
        return x

    def adopt(self, x: Array, base: Array, c: Array, work: Array) -> None:
        """`b ← c`."""
        np.copyto(x, c)
