"""Accumulated gradient normalization: Hermans, Spanakis, Möckel 2017, arXiv 1710.02368."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from springline.rules.outer import Outer
from springline.rules.rule import Array, Rule


@dataclass(frozen=True, kw_only=True)
class AGN(Rule):
    """Every τ steps the mean gradient since the last exchange takes one outer step on the center.

    ```
    a = Σ g      c ← outer(c, a/τ)      x ← c      a ← 0
    ```
    Asynchronous. Inner and outer optimizer are of the same kind but two objects: the outer one's
    state belongs to the center, one copy shared by all workers.

    Args:
        period: τ, local steps between two exchanges.
        workers: p, the configured number of workers.
        outer: the outer optimizer, with the inner one's settings.
        fixed_rate: whether all workers step with the outer optimizer's own learning rate. By
            default each worker's current one travels with its messages, unless the rate is a
            function of the exchange's number.
    """

    outer: Outer
    fixed_rate: bool = False

    name: ClassVar[str] = "agn"
    accumulates: ClassVar[bool] = True

    @property
    def own_rates(self) -> bool:
        """By default."""
        return not (self.fixed_rate or callable(self.outer.learning_rate))

    def settings(self) -> dict[str, Any]:
        """A learning rate that travels with every message is not among them."""
        settings = super().settings()
        if self.own_rates:
            settings["outer"].pop("learning_rate", None)
        return settings

    def contribute(self, x: Array, a: Array, base: Array, n: int, out: Array) -> Array:
        """`a/τ`, or a divided by the number of gradients it holds."""
        return np.divide(a, n, out=out)

    def adopt(self, x: Array, base: Array, c: Array, work: Array) -> None:
        """`x ← c`."""
        np.copyto(x, c)
