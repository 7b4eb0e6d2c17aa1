"""The outer optimizers that a user may choose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from springline.checks import at_least_one, is_number, true_or_false
from springline.rules.outer import Array, Exchange, Outer, Point, Rate, Shape

_MOST_IN_PLACE = 1e6  # a rate with which a message that can be squared cannot overflow


@dataclass(frozen=True)
class _Optimizer(Outer):
    learning_rate: Rate = field()  # without the contract's default: a rate of 0 trains nothing

    at_least_zero: ClassVar[tuple[str, ...]] = ()
    above_zero: ClassVar[tuple[str, ...]] = ()
    below_one: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("learning_rate", *self.at_least_zero, *self.below_one):
            self._check(name, 1.0 if name in self.below_one else np.inf)
        for name in self.above_zero:
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < np.inf):
                raise ValueError(f"`{name}` must be a number above 0. Received: {name}={value!r}.")

    def _check(self, name: str, below: float = np.inf) -> None:
        value = getattr(self, name)
        if name == "learning_rate" and callable(value):
            value = self.rate("", 0)
        if not (is_number(value) and 0 <= value < below):
            raise ValueError(
                f"`{name}` must be a number with 0 <= {name} < {below:g}. "
                f"Received: {name}={value!r}."
            )


@dataclass(frozen=True)
class SGD(_Optimizer):
    """`c ← c − ηg`."""

    kind = "sgd"

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step."""
        np.multiply(g, exchange.rate, out=then.c)
        np.subtract(now.c, then.c, out=then.c)

    def step_in_place(self, c: Array, g: Array, exchange: Exchange, work: Array) -> bool:
        """Take one step, without a copy."""
        if exchange.rate > _MOST_IN_PLACE:
            return False
        np.subtract(c, np.multiply(g, exchange.rate, out=work), out=c)
        return True


@dataclass(frozen=True)
class Momentum(_Optimizer):
    """`m ← μm + g`, `c ← c − ηm`."""

    momentum: float = 0.9

    kind = "momentum"
    stateless = False
    below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `m`."""
        return {"momentum": (shape, 0.0)}

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step."""
        m = np.multiply(now.state["momentum"], self.momentum, out=then.state["momentum"])
        np.add(m, g, out=m)
        np.multiply(self._direction(m, g, then.c), exchange.rate, out=then.c)
        np.subtract(now.c, then.c, out=then.c)

    def _direction(self, m: Array, g: Array, work: Array) -> Array:
        return m


@dataclass(frozen=True)
class Nesterov(Momentum):
    """`m ← μm + g`, `c ← c − η(g + μm)`."""

    kind = "nesterov"

    def _direction(self, m: Array, g: Array, work: Array) -> Array:
        np.multiply(m, self.momentum, out=work)
        return np.add(work, g, out=work)


@dataclass(frozen=True)
class DelayedNesterov(Momentum):
    """Nesterov momentum without rounds: Liu et al. 2024, arXiv 2401.09135.

    Each push `c ← c − ηg/N`, `D ← D + g`; each N-th also `m ← μm + D/N`, `c ← c − ημm`, `D ← 0`:
    N pushes are one Nesterov step with their mean.

    Args:
        learning_rate: η.
        momentum: μ.
        every: N; by default the number of workers.
    """

    every: int | None = None

    kind = "delayed nesterov"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every is not None:
            at_least_one("every", self.every, "It is the number of pushes to one momentum step.")

    def for_workers(self, workers: int) -> DelayedNesterov:
        """Let every worker push once to a momentum step."""
        return self if self.every else replace(self, every=workers)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `m`, `D` and the pushes in `D`."""
        return {"momentum": (shape, 0.0), "delayed": (shape, 0.0), "pushes": ((1,), 0.0)}

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one push."""
        n, m, delayed = self.every or 1, then.state["momentum"], then.state["delayed"]
        pushes = now.state["pushes"][0] + 1
        np.multiply(g, exchange.rate / n, out=then.c)
        np.subtract(now.c, then.c, out=then.c)
        np.add(now.state["delayed"], g, out=delayed)
        if pushes < n:
            np.copyto(m, now.state["momentum"])
        else:
            np.divide(delayed, n, out=delayed)
            np.multiply(now.state["momentum"], self.momentum, out=m)
            np.add(m, delayed, out=m)
            np.multiply(m, exchange.rate * self.momentum, out=delayed)
            np.subtract(then.c, delayed, out=then.c)
            delayed.fill(0)
            pushes = 0
        then.state["pushes"][0] = pushes


@dataclass(frozen=True)
class BlockMomentum(_Optimizer):
    """`d ← μd − ζg`, `c ← c + d`: Chen & Huo 2016 (BMUF).

    Args:
        learning_rate: ζ, the block learning rate; the authors' is 1.
        momentum: μ, the block momentum; by default the authors', 1 − 1/workers.
        nesterov: whether workers go on from `c + μd`. What is saved and evaluated is `c`.
    """

    learning_rate: Rate = 1.0
    momentum: float | None = None
    nesterov: bool = False

    kind = "block momentum"
    stateless = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum is not None:
            self._check("momentum", below=1.0)
        true_or_false("nesterov", self.nesterov)

    def for_workers(self, workers: int) -> BlockMomentum:
        """Let the momentum be 1 − 1/workers."""
        return self if self.momentum is not None else replace(self, momentum=1 - 1 / workers)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `d`."""
        return {"direction": (shape, 0.0)}

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step."""
        d = np.multiply(now.state["direction"], self.momentum or 0.0, out=then.state["direction"])
        np.multiply(g, exchange.rate, out=then.c)
        np.subtract(d, then.c, out=d)
        np.add(now.c, d, out=then.c)

    def publish(self, point: Point, out: Array) -> Array:
        """Return `c`, or `c + μd`."""
        if not self.nesterov:
            return point.c
        np.multiply(point.state["direction"], self.momentum or 0.0, out=out)
        return np.add(out, point.c, out=out)


@dataclass(frozen=True)
class SlowMomentum(_Optimizer):
    """`u ← βu + g/η`, `c ← c − αηu`, η the workers' rate: Wang et al. 2019, arXiv 1910.00643.

    Where η is 0, `c ← c − g`, and `u` stays. Where workers send no rate, η is 1: the same as with
    any constant one.

    Args:
        learning_rate: α, the slow learning rate.
        momentum: β, the slow momentum.
    """

    learning_rate: Rate = 1.0
    momentum: float = 0.5

    kind = "slow momentum"
    stateless = False
    below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `u`."""
        return {"momentum": (shape, 0.0)}

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step."""
        η, u = 1.0 if exchange.sent is None else exchange.sent, then.state["momentum"]
        if η == 0:
            np.copyto(u, now.state["momentum"])
            np.subtract(now.c, g, out=then.c)
            return
        np.divide(g, η, out=then.c)
        np.multiply(now.state["momentum"], self.momentum, out=u)
        np.add(u, then.c, out=u)
        np.multiply(u, exchange.rate * η, out=then.c)
        np.subtract(now.c, then.c, out=then.c)


@dataclass(frozen=True)
class Adagrad(_Optimizer):
    """`s ← s + g²`, `c ← c − ηg/√s`."""

    initial_accumulator: float = 0.1

    kind = "adagrad"
    stateless = False
    at_least_zero: ClassVar[tuple[str, ...]] = ("initial_accumulator",)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `s`."""
        return {"accumulator": (shape, self.initial_accumulator)}

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step; an `s` of 0 stands for a `g` of 0, which moves nothing."""
        s = np.multiply(g, g, out=then.state["accumulator"])
        np.add(now.state["accumulator"], s, out=s)
        np.sqrt(s, out=then.c)
        np.maximum(then.c, 1e-10, out=then.c)
        np.divide(g, then.c, out=then.c)
        np.multiply(then.c, exchange.rate, out=then.c)
        np.subtract(now.c, then.c, out=then.c)


@dataclass(frozen=True)
class Adam(_Optimizer):
    """`m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`, `c ← c − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m/(√v + ε)`."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    kind = "adam"
    stateless = False
    above_zero: ClassVar[tuple[str, ...]] = ("epsilon",)
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `m`, `v` and `t`."""
        return {"m": (shape, 0.0), "v": (shape, 0.0), "t": ((1,), 0.0)}

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step."""
        then.state["t"][0] = now.state["t"][0] + 1
        t = float(then.state["t"][0])
        v = np.multiply(g, g, out=then.state["v"])
        np.subtract(v, now.state["v"], out=v)
        np.multiply(v, 1 - self.beta2, out=v)
        np.add(now.state["v"], v, out=v)  # v + (1−β₂)(g² − v)
        m = np.subtract(g, now.state["m"], out=then.state["m"])
        np.multiply(m, 1 - self.beta1, out=m)
        np.add(now.state["m"], m, out=m)
        np.sqrt(v, out=then.c)
        np.add(then.c, self.epsilon, out=then.c)
        np.divide(m, then.c, out=then.c)
        bias = (1 - self.beta2**t) ** 0.5 / (1 - self.beta1**t)
        np.multiply(then.c, exchange.rate * bias, out=then.c)
        np.subtract(now.c, then.c, out=then.c)
