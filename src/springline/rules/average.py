"""Model averaging: McDonald et al. 2010, Zinkevich et al. 2010."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from springline.rules.outer import Outer, Replace
from springline.rules.rule import Array, Rule


@dataclass(frozen=True, kw_only=True)
class ModelAverage(Rule):
    """Every τ steps all live workers meet and go on from the mean of their parameters.

    ```
    c ← mean(x₁ … x_p)      x ← c
    ```
    Synchronous: an exchange is a round. The mean divides by the contributions in its round.

    Args:
        period: τ, local steps between two rounds.
        workers: p, the configured number of workers.
    """

    name: ClassVar[str] = "average"
    rounds: ClassVar[bool] = True

    @property
    def outer(self) -> Outer:
        """`c ← mean`."""
        return Replace()

    @property
    def follows(self) -> bool:
        """The mean of one worker is its own."""
        return self.workers == 1

    def contribute(self, x: Array, a: Array, base: Array, n: int, out: Array) -> Array:
        """Return `x` itself."""
        return x

    def adopt(self, x: Array, base: Array, c: Array, work: Array) -> None:
        """`x ← c`, which it is already where the center follows."""
        if not self.follows:
            np.copyto(x, c)
