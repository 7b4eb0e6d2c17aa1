"""Rules that send a pseudo-gradient: DiLoCo and its relatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from springline.checks import count, is_number, true_or_false
from springline.errors import SettingsError
from springline.rules.optimizers import DelayedNesterov, Nesterov, SlowMomentum
from springline.rules.outer import Exchange, Outer
from springline.rules.period import Period, typical
from springline.rules.rule import Array, Rule

Staleness = Literal["inverse", "sqrt"]
_SHORT = 0.7, 0.5  # outer rate and momentum for short periods


@dataclass(frozen=True, kw_only=True)
class PseudoGradient(Rule):
    """Every τ steps an outer optimizer takes a step with how far workers have come.

    ```
    Δ = base − x      c ← outer(c, Δ)      x ← c + μ(x − c)      base ← c
    ```

    Args:
        period: τ, local steps between two exchanges.
        workers: p, the configured number of workers.
        fragments: see `Rule`.
        outer: the outer optimizer, to which Δ is the gradient.
        delay: local steps from making a message to adopting the step that it led to.
        mixing: μ in [0, 1): the share of its own way that a worker keeps when it adopts `c`.
    """

    # None stands for the default, which depends on the period; it is there once a rule is made.
    outer: Outer = None  # type: ignore[assignment]
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_outer(self.default_outer() if self.outer is None else self.outer)
        count("delay", self.delay)
        if not (is_number(self.mixing) and 0 <= self.mixing < 1):
            raise ValueError(
                "`mixing` must be a number with 0 <= mixing < 1: the share of its own way that a "
                f"worker keeps. Received: mixing={self.mixing!r}."
            )
        if self.delay:
            gap = self.gaps().constant
            if gap is None:
                raise SettingsError("`delay` needs a constant `period`. Leave one of them out.")
            if self.delay >= gap:
                raise SettingsError(
                    f"`delay` must be below the steps between two exchanges, {gap}, so that one "
                    f"message at most is under way. Received: delay={self.delay}."
                )

    def default_outer(self) -> Outer:
        """Return the outer optimizer that is used if none is given."""
        return Nesterov(*momentum_for(self.period))

    @property
    def keeps_base(self) -> bool:
        """Δ is measured from it."""
        return True

    def settings(self) -> dict[str, Any]:
        """Also the delay and the mixing."""
        return super().settings() | {"delay": int(self.delay), "mixing": float(self.mixing)}

    def contribute(self, x: Array, a: Array, base: Array, n: int, out: Array) -> Array:
        """`base − x`."""
        return np.subtract(base, x, out=out)

    def adopt(self, x: Array, base: Array, c: Array, work: Array) -> None:
        """`x ← c + μ(x − c)`, `base ← c`."""
        if self.mixing:
            np.subtract(x, c, out=work)
            np.multiply(work, self.mixing, out=work)
            np.add(work, c, out=x)
        else:
            np.copyto(x, c)
        np.copyto(base, c)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(PseudoGradient):
    """The outer step is taken in rounds, with the mean of all workers' Δ.

    Douillard et al. 2023, arXiv 2311.08105; with fragments, a delay and mixing Streaming DiLoCo,
    arXiv 2501.18512.
    """

    name: ClassVar[str] = "diloco"
    rounds: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SlowMo(DiLoCo):
    """DiLoCo with slow momentum, which knows the workers' mean learning rate of the period.

    Wang et al. 2019, arXiv 1910.00643.
    """

    name: ClassVar[str] = "slowmo"
    sends_rates: ClassVar[bool] = True

    def default_outer(self) -> Outer:
        """α 1, β 0.5."""
        return SlowMomentum()


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCo(PseudoGradient):
    """Every worker's Δ is a step of its own, without waiting: Liu et al. 2024, arXiv 2401.09135.

    Args:
        period: τ, local steps between two exchanges.
        workers: p, the configured number of workers.
        fragments: see `Rule`.
        outer: by default delayed Nesterov momentum over p pushes, 0.7 and 0.5; 1.0 and no momentum
            for periods over 20 steps.
        delay: local steps from making a message to adopting the step that it led to.
        mixing: the share of a worker's own way that it keeps when it adopts the center.
        staleness: how a message counts that missed s exchanges of others: "inverse" 1/(s + 1),
            "sqrt" 1/√(s + 1).
        dynamic_steps: whether a slower worker makes fewer steps in a period (DyLU):
            ⌊τ·v/v_max⌋, v the steps per second.
    """

    staleness: Staleness | None = None
    dynamic_steps: bool = False

    name: ClassVar[str] = "async_diloco"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness not in (None, "inverse", "sqrt"):
            raise ValueError(
                '`staleness` must be None, "inverse" or "sqrt". '
                f"Received: staleness={self.staleness!r}."
            )
        true_or_false("dynamic_steps", self.dynamic_steps)
        if self.dynamic_steps and (callable(self.period) or self.delay):
            raise SettingsError(
                "`dynamic_steps` needs a constant `period` and no `delay`. Leave one of them out."
            )

    @property
    def paced(self) -> bool:
        """With `dynamic_steps`."""
        return bool(self.dynamic_steps)

    def default_outer(self) -> Outer:
        """Delayed Nesterov over p pushes, without momentum where a period is over 20 steps."""
        pair = momentum_for(self.period)
        return DelayedNesterov(*(pair if pair == _SHORT else (1.0, 0.0)))

    def settings(self) -> dict[str, Any]:
        """Also how staleness counts."""
        return super().settings() | {"staleness": self.staleness}

    def weight(self, exchange: Exchange) -> float:
        """1, 1/(s + 1) or 1/√(s + 1)."""
        s = exchange.staleness + 1
        if self.staleness == "sqrt":
            return 1 / math.sqrt(s)
        return 1 / s if self.staleness == "inverse" else 1.0


def momentum_for(period: Period) -> tuple[float, float]:
    """Return the outer learning rate and momentum that held in our runs with such a period.

    The paper's 0.7 and 0.9 are for periods of hundreds of steps and long runs.
    """
    steps = typical(period) or 50
    if steps <= 20:
        return _SHORT
    return (1.0, 0.5) if steps < 500 else (0.7, 0.9)
