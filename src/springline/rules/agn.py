"""Accumulated gradient normalization: Hermans, Spanakis, Möckel 2017, arXiv 1710.02368."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from springline.rules.outer import Outer
from springline.rules.rule import Array, CenterBlock, LocalBlock, Rule


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
        optimizer: the outer optimizer, with the inner one's settings.
    """

    optimizer: Outer

    name: ClassVar[str] = "agn"
    accumulates: ClassVar[bool] = True

    @property
    def outer(self) -> Outer:
        """The optimizer of the center."""
        return self.optimizer

    def settings(self) -> dict[str, Any]:
        """The learning rate is not among them: it travels with every message."""
        return super().settings() | {"outer": self.optimizer.settings()}

    def contribute(self, local: LocalBlock, c: Array, gradients: int) -> Array:
        """`a/τ`, or a divided by the number of gradients it holds."""
        np.divide(local.a, gradients, out=local.message)
        return local.message

    def merge(self, center: CenterBlock, messages: Sequence[Array], rate: float) -> None:
        """One outer step on `c` for each message."""
        for g in messages:
            self.optimizer.step(center.name, center.c, g, center.state, rate, center.work)

    def adopt(self, local: LocalBlock, message: Array, c: Array) -> None:
        """`x ← c`."""
        np.copyto(local.x, c)
