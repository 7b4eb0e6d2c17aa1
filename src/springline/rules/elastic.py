"""Elastic averaging: Zhang, Choromanska, LeCun 2015, arXiv 1412.6651."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from springline.checks import is_number
from springline.rules.outer import Outer, Replace, Toward
from springline.rules.rule import Array, Rule, size


@dataclass(frozen=True, kw_only=True)
class ElasticAverage(Rule):
    """Every τ steps worker and center move towards each other by the same `δ = α(x − c)`.

    ```
    δ = α(x − c)      c ← c + δ      x ← x − δ      c̃ ← the c that was read
    ```
    Asynchronous. The same δ is added on one side and subtracted on the other, so that `x + c` is
    conserved, even if `c` moved between the read and the add.

    The loss gains `ρ·½‖x − c̃‖²`, of all that is trained: in every step each parameter's gradient
    gains `ρ(x − c̃)`, also one that had none, and also rows of an embedding that the step did not
    use.

    Alone, at the default rate, the center moves onto the worker and the worker not at all: that is
    plain training, to the bit.

    In rounds (a process group) all workers' δ are made from the same `c` and added at once, which
    is the paper's synchronous form.

    Args:
        period: τ, local steps between two exchanges.
        workers: p, the configured number of workers.
        moving_rate: α in (0, 1]. The default is the authors' `0.9/p` whatever τ is; TensorFlow's
            default was `0.9/τ/p`, τ times weaker, and `springline.tensorflow` keeps that one.
        rho: ρ ≥ 0, the exploration penalty; 0 costs nothing and is advised for asynchronous runs.

    >>> ElasticAverage(workers=2).alpha
    0.45
    """

    moving_rate: float | None = None
    rho: float = 0.0

    name: ClassVar[str] = "elastic"
    adopts_seen: ClassVar[bool] = True
    BETA: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        α, p = self.alpha, self.workers
        if not (is_number(α) and 0 < α <= 1):
            raise ValueError(
                "`moving_rate` must be in (0, 1]: it is the share of the way that worker and "
                f"center move towards each other. Received: moving_rate={self.moving_rate!r}. "
                f"Leave it out for the default, 0.9/workers = {self.BETA / p:g}."
            )
        if not (is_number(self.rho) and 0 <= self.rho < math.inf):
            raise ValueError(
                f"`rho` must be a finite number >= 0. Received: rho={self.rho!r}. "
                "0 is advised for asynchronous runs."
            )
        if α * p > 1:
            warnings.warn(
                f"moving_rate × workers = {α:g} × {p} = {α * p:g} is above 1: the center may "
                f"overshoot the mean of its workers. At most {1 / p:g} is advised.",
                stacklevel=3,
            )

    @property
    def alpha(self) -> float:
        """α, with its default filled in."""
        if self.follows:
            return 1.0
        return self.BETA / self.workers if self.moving_rate is None else self.moving_rate

    @property
    def outer(self) -> Outer:
        """`c ← c + αn(m − c)`, which is `c + Σδ`; `x` where the center follows."""
        return Replace() if self.follows else Toward(self.alpha)

    @property
    def follows(self) -> bool:
        """One worker at the default rate is not pulled back."""
        return self.workers == 1 and self.moving_rate is None

    @property
    def keeps_base(self) -> bool:
        """`c̃` is needed for the penalty only."""
        return self.penalizes

    @property
    def penalizes(self) -> bool:
        """With ρ = 0 there is nothing to add."""
        return self.rho > 0

    def settings(self) -> dict[str, Any]:
        """ρ is each worker's own affair; α is not."""
        return super().settings() | {"moving_rate": float(self.alpha)}

    def contribute(self, x: Array, a: Array, base: Array, n: int, out: Array) -> Array:
        """Return `x` itself."""
        return x

    def adopt(self, x: Array, base: Array, c: Array, work: Array) -> None:
        """`x ← x − α(x − c)`, `c̃ ← c`; `x` stays where the center follows."""
        if base.size:
            np.copyto(base, c)
        if not self.follows:
            np.subtract(x, c, out=work)
            np.multiply(work, self.alpha, out=work)
            np.subtract(x, work, out=x)

    def swap(self, x: Array, base: Array, c: Array, work: Array) -> bool:
        """Compute δ once for both sides."""
        if self.follows:
            return False
        δ = np.subtract(x, c, out=work)
        np.multiply(δ, self.alpha, out=δ)
        if not math.isfinite(size(δ)):
            return False  # the center may overflow
        if base.size:
            np.copyto(base, c)
        np.add(c, δ, out=c)
        np.subtract(x, δ, out=x)
        return True

    def penalize(self, g: Array, x: Array, base: Array, work: Array) -> None:
        """`g ← g + ρ(x − c̃)`."""
        np.subtract(x, base, out=work)
        np.multiply(work, self.rho, out=work)
        np.add(g, work, out=g, casting="same_kind")
