"""Elastic averaging: Zhang, Choromanska, LeCun 2015, arXiv 1412.6651."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from springline.checks import is_number
from springline.rules.rule import Array, CenterBlock, LocalBlock, Rule


@dataclass(frozen=True, kw_only=True)
class ElasticAverage(Rule):
    """Every τ steps worker and center move towards each other by the same `δ = α(x − c)`.

    ```
    δ = α(x − c)      c ← c + δ      x ← x − δ      c̃ ← the c that was read
    ```
    Asynchronous. The same δ is added on one side and subtracted on the other, so that `x + c` is
    conserved, even if `c` moved between the read and the add. The loss gains `ρ·½‖x − c̃‖²`.

    Alone, at the default rate, the center moves onto the worker and the worker not at all: that is
    plain training, to the bit.

    On a synchronous center all workers' δ are made from the same `c` and added at once, which is
    the paper's synchronous form.

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
    reads_center: ClassVar[bool] = True
    adopts_message: ClassVar[bool] = True
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
    def follows(self) -> bool:
        """One worker at the default rate is not pulled back."""
        return self.workers == 1 and self.moving_rate is None

    @property
    def keeps_copy(self) -> bool:
        """`c̃` is needed for the penalty only."""
        return self.rho > 0

    def settings(self) -> dict[str, Any]:
        """ρ is each worker's own affair; α is not."""
        return super().settings() | {"moving_rate": float(self.alpha)}

    def contribute(self, local: LocalBlock, c: Array, gradients: int) -> Array:
        """`δ = α(x − c)`; `x` where the center follows."""
        if local.copy is not None:
            np.copyto(local.copy, c)
        δ = local.message
        if self.follows:
            np.copyto(δ, local.x)
            return δ
        np.subtract(local.x, c, out=δ)
        np.multiply(δ, self.alpha, out=δ)
        return δ

    def merge(self, center: CenterBlock, messages: Sequence[Array], rate: float) -> None:
        """`c ← c + δ`; `x` where the center follows."""
        for δ in messages:
            if self.follows:
                np.copyto(center.c, δ)
            elif center.large:
                np.add(center.c, δ, out=center.work)
                np.copyto(center.c, center.work)
            else:
                np.add(center.c, δ, out=center.c)

    def adopt(self, local: LocalBlock, message: Array, c: Array) -> None:
        """`x ← x − δ`; `x` stays where the center follows."""
        if not self.follows:
            np.subtract(local.x, message, out=local.x)

    def penalize(self, g: Array, x: Array, copy: Array, work: Array) -> None:
        """`g ← g + ρ(x − c̃)`."""
        np.subtract(x, copy, out=work)
        np.multiply(work, self.rho, out=work)
        np.add(g, work, out=g, casting="same_kind")
