"""Rules that no file of springline knows: what CONTRIBUTING says of adding one, as code.

`MeanOfPseudoGradients` meets in rounds, `Pushes` does not. Both contribute how far a worker has
gone since it last adopted the center. The outer optimizers beside them have state of their own and
stay exact with integers, for the tests that kill workers.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from springline.rules import Outer, Rule


@dataclass(frozen=True, kw_only=True)
class Pushes(Rule):
    """`Δ = base − x` takes a step of an outer optimizer; `x ← c`, `base ← c`."""

    outer: Outer

    name: ClassVar[str] = "pushes"

    @property
    def keeps_base(self):
        return True

    def contribute(self, x, a, base, n, out):
        return np.subtract(base, x, out=out)

    def adopt(self, x, base, c, work):
        np.copyto(x, c)
        np.copyto(base, c)


@dataclass(frozen=True, kw_only=True)
class MeanOfPseudoGradients(Pushes):
    """The same with the mean of all workers' `Δ`."""

    name: ClassVar[str] = "mean of pseudo-gradients"
    rounds: ClassVar[bool] = True


@dataclass(frozen=True)
class Stale(Pushes):
    """The same with a weight: what missed exchanges of others counts less."""

    name: ClassVar[str] = "stale"

    def weight(self, exchange):
        return 1 / (exchange.staleness + 1)


@dataclass(frozen=True)
class Rolling(Outer):
    """`m ← (m + Δ) mod N`, `c ← c − m`: momentum that starts again every N steps."""

    every: int = 8

    kind = "rolling"
    stateless = False

    def state(self, name, shape):
        return {"m": (shape, 0.0)}

    def step(self, now, g, exchange, then):
        m = np.add(now.state["m"], g, out=then.state["m"])
        np.mod(m, self.every, out=m)
        np.subtract(now.c, m, out=then.c)

    def after(self, steps):
        """Where a center that began at 0 is after so many steps with `Δ = 1`."""
        n = self.every
        return -(steps // n * (n * (n - 1) // 2) + (steps % n) * (steps % n + 1) // 2)


@dataclass(frozen=True)
class Decaying(Outer):
    """`c ← c − Δ/(k + 1)` in the exchange with the number k."""

    kind = "decaying"

    def step(self, now, g, exchange, then):
        np.divide(g, exchange.number + 1, out=then.c)
        np.subtract(now.c, then.c, out=then.c)


@dataclass(frozen=True)
class EveryFourth(Outer):
    """Counts pushes: `c ← c − Δ`, `D ← D + Δ`; every fourth also `c ← c − D`, `D ← 0`."""

    kind = "every fourth"
    stateless = False

    def state(self, name, shape):
        return {"D": (shape, 0.0), "pushes": ((1,), 0.0)}

    def step(self, now, g, exchange, then):
        then.state["pushes"][0] = now.state["pushes"][0] + 1
        np.add(now.state["D"], g, out=then.state["D"])
        np.subtract(now.c, g, out=then.c)
        if then.state["pushes"][0] % 4 == 0:
            np.subtract(then.c, then.state["D"], out=then.c)
            then.state["D"].fill(0)

    def after(self, steps):
        """Where a center that began at 0 is after so many steps with `Δ = 1`."""
        return -(steps + 4 * (steps // 4))


@dataclass(frozen=True)
class Ahead(Outer):
    """`d ← d/2 − Δ`, `c ← c + d`; workers are given `c + d/2`."""

    kind = "ahead"
    stateless = False

    def state(self, name, shape):
        return {"d": (shape, 0.0)}

    def step(self, now, g, exchange, then):
        d = np.multiply(now.state["d"], 0.5, out=then.state["d"])
        np.subtract(d, g, out=d)
        np.add(now.c, d, out=then.c)

    def publish(self, point, out):
        np.multiply(point.state["d"], 0.5, out=out)
        return np.add(out, point.c, out=out)
