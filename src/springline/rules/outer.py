"""Outer optimizers: what turns a reduced message into the next center.

A step is pure: it reads the point where the optimizer is and writes the next one, never over what
is there. The caller puts it in place, so that a process which is killed in the middle leaves the
center before the step or after it. Overflow raises: the caller has set numpy to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from springline.checks import is_number

Array = NDArray[Any]
State = Mapping[str, Array]
Shape = tuple[int, ...]


class Point(NamedTuple):
    """Where an outer optimizer is, with one block: `c` and its state."""

    c: Array
    state: State


@dataclass(slots=True)
class Exchange:
    """What a rule and its outer optimizer may know of an exchange.

    Args:
        number: exchanges (rounds) before this one.
        count: messages that were reduced to one.
        staleness: exchanges of others since this worker's last.
        rate: the learning rate that came with the message, for this parameter.
        name: the parameter, where a block belongs to one.
    """

    number: int = 0
    count: int = 1
    staleness: int = 0
    rate: float = 0.0
    name: str = ""


class Outer(ABC):
    """The contract of an outer optimizer.

    Attributes:
        kind: its name.
        stateless: whether it keeps nothing: then its steps need no lock.
        whole: whether it must see whole parameters in their own shape, not flat blocks of them.
        replaces: whether the next `c` is the message itself: such a step may be made twice.
        learning_rate: where a worker sends none of its own.
    """

    kind: str
    stateless: bool = True
    whole: bool = False
    replaces: bool = False
    learning_rate: float = 0.0

    def settings(self) -> dict[str, Any]:
        """What all workers must agree on, as JSON values."""
        values = {f.name: float(getattr(self, f.name)) for f in fields(cast("Any", self))}
        return {"kind": self.kind} | values

    def rate(self, name: str) -> float:
        """Return the learning rate of a parameter, where a worker sends none of its own."""
        return self.learning_rate

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """For a parameter, the shape and first value of each array of state.

        Unless `whole`, an array has the parameter's shape, or (1,): a number per block.
        """
        return {}

    @abstractmethod
    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Write all of `then`: the point after `now` and the message `g`."""

    def publish(self, point: Point, out: Array) -> Array:
        """Return what workers are given for `c`: `c` itself, or `out`, once it is written."""
        return point.c


@dataclass(frozen=True)
class Replace(Outer):
    """`c ← m`."""

    kind = "replace"
    replaces = True

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take the message."""
        np.copyto(then.c, g)


@dataclass(frozen=True)
class Toward(Outer):
    """`c ← c + αn(m − c)`, with n the messages that were reduced to `m`."""

    share: float

    kind = "toward"

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Move towards the message."""
        np.subtract(g, now.c, out=then.c)
        np.multiply(then.c, self.share * exchange.count, out=then.c)
        np.add(now.c, then.c, out=then.c)


@dataclass(frozen=True)
class _Optimizer(Outer):
    learning_rate: float

    at_least_zero: ClassVar[tuple[str, ...]] = ()
    above_zero: ClassVar[tuple[str, ...]] = ()
    below_one: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("learning_rate", *self.at_least_zero, *self.below_one):
            value, top = getattr(self, name), 1.0 if name in self.below_one else np.inf
            if not (is_number(value) and 0 <= value < top):
                raise ValueError(
                    f"`{name}` must be a number with 0 <= {name} < {top:g}. "
                    f"Received: {name}={value!r}."
                )
        for name in self.above_zero:
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < np.inf):
                raise ValueError(f"`{name}` must be a number above 0. Received: {name}={value!r}.")


@dataclass(frozen=True)
class SGD(_Optimizer):
    """`c ← c − ηg`."""

    kind = "sgd"

    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Take one step."""
        np.multiply(g, exchange.rate, out=then.c)
        np.subtract(now.c, then.c, out=then.c)


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
