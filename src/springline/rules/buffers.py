"""Buffers (BatchNorm's averages) under the asynchronous rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from springline.rules.rule import Array, CenterBlock, LocalBlock, Rule


def buffer_rule(rule: Rule) -> Rule:
    """Return the rule for buffers beside `rule`: a round takes their mean as it does of all."""
    if rule.synchronous:
        return rule
    return BufferAverage(period=rule.period, workers=rule.workers)


@dataclass(frozen=True, kw_only=True)
class BufferAverage(Rule):
    """The center follows the workers' buffers `b` and every worker takes it over.

    ```
    c ← c + (b − c)/p      b ← c
    ```
    Alone, `c ← b`, and the worker keeps its own.
    """

    name: ClassVar[str] = "buffers"
    reads_center: ClassVar[bool] = True

    @property
    def follows(self) -> bool:
        """The buffers of one worker are its own."""
        return self.workers == 1

    def contribute(self, local: LocalBlock, c: Array, gradients: int) -> Array:
        """`(b − c)/p`; `b` where the center follows."""
        if self.follows:
            np.copyto(local.message, local.x)
            return local.message
        np.subtract(local.x, c, out=local.message)
        np.divide(local.message, self.workers, out=local.message)
        return local.message

    def merge(self, center: CenterBlock, messages: Sequence[Array], rate: float) -> None:
        """`c ← c + (b − c)/p`; `b` where the center follows."""
        for message in messages:
            if self.follows:
                np.copyto(center.c, message)
                continue
            np.add(center.c, message, out=center.work)
            np.copyto(center.c, center.work)

    def adopt(self, local: LocalBlock, message: Array, c: Array) -> None:
        """`b ← c`."""
        np.copyto(local.x, c)
