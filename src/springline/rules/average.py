"""Model averaging: McDonald et al. 2010, Zinkevich et al. 2010."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from springline.rules.rule import Array, CenterBlock, LocalBlock, Rule


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
    synchronous: ClassVar[bool] = True

    @property
    def follows(self) -> bool:
        """The mean of one worker is its own."""
        return self.workers == 1

    def contribute(self, local: LocalBlock, c: Array, gradients: int) -> Array:
        """Return `x` itself."""
        return local.x

    def merge(self, center: CenterBlock, messages: Sequence[Array], rate: float) -> None:
        """`c ← mean(x₁ … x_p)`."""
        first, *others = messages
        if not others:
            np.copyto(center.c, first)
            return
        n, mean = len(messages), center.work
        try:
            np.add(first, others[0], out=mean)
            for x in others[1:]:
                np.add(mean, x, out=mean)
            np.divide(mean, n, out=center.c)
        except FloatingPointError:  # the sum is too large, the mean is not
            np.divide(first, n, out=mean)
            for x in others:
                np.add(mean, x / n, out=mean)
            np.copyto(center.c, mean)

    def adopt(self, local: LocalBlock, message: Array, c: Array) -> None:
        """`x ← c`."""
        np.copyto(local.x, c)
