"""Outer optimizers: what turns a message into a new center. A front end may bring its own.

A worker may be killed between any two stores of `step`, and the center and its state stay. So each
`step` here writes in an order of which any prefix is safe: the step count before the moments, a
denominator before its numerator, the center last. Overflow raises (the caller has set numpy to)
while the result is still in `work`, and so never gets into the center.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from springline.checks import is_number

Array = NDArray[Any]
State = Mapping[str, Array]
Shape = tuple[int, ...]


class Outer(Protocol):
    """The contract of an outer optimizer."""

    @property
    def learning_rate(self) -> float:
        """The rate where a worker sends none of its own."""

    @property
    def elementwise(self) -> bool:
        """Whether `step` may be given parts of a parameter, flat, instead of the whole."""

    @property
    def alone(self) -> bool:
        """Whether a parameter's steps must be taken one at a time, whatever a center's locks are.

        So it is where state of two steps at once, some from either, makes a step far too large.
        """

    def settings(self) -> dict[str, Any]:
        """What all workers must agree on, as JSON values: all but the learning rate."""

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """For a parameter, the shape and first value of each array of state.

        An elementwise optimizer has arrays of the parameter's shape and of shape (1,).
        """

    def advance(self, state: State) -> None:
        """Count a step of one parameter, before the calls of `step` for its parts."""

    def step(self, name: str, c: Array, g: Array, state: State, rate: float, work: Array) -> None:
        """Move the parameter `name`, `c`, in place by `g`; `work` is room of the same shape."""


@dataclass(frozen=True)
class _Elementwise:
    learning_rate: float

    kind: ClassVar[str]
    elementwise: ClassVar[bool] = True
    alone: ClassVar[bool] = False
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

    def settings(self) -> dict[str, Any]:
        values = {k: float(v) for k, v in asdict(self).items() if k != "learning_rate"}
        return {"kind": self.kind} | values

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        return {}

    def advance(self, state: State) -> None:
        """Most have no step count."""


def _subtract(c: Array, work: Array) -> None:
    np.subtract(c, work, out=work)
    np.copyto(c, work)


@dataclass(frozen=True)
class SGD(_Elementwise):
    """`c ← c − ηg`."""

    kind: ClassVar[str] = "sgd"

    def step(self, name: str, c: Array, g: Array, state: State, rate: float, work: Array) -> None:
        """Take one step."""
        np.multiply(g, rate, out=work)
        _subtract(c, work)


@dataclass(frozen=True)
class Momentum(_Elementwise):
    """`m ← μm + g`, `c ← c − ηm`."""

    momentum: float = 0.9

    kind: ClassVar[str] = "momentum"
    below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `m`."""
        return {"momentum": (shape, 0.0)}

    def step(self, name: str, c: Array, g: Array, state: State, rate: float, work: Array) -> None:
        """Take one step."""
        m = state["momentum"]
        np.multiply(m, self.momentum, out=work)
        np.add(work, g, out=work)
        np.copyto(m, work)
        np.multiply(work, rate, out=work)
        _subtract(c, work)


@dataclass(frozen=True)
class Adagrad(_Elementwise):
    """`s ← s + g²`, `c ← c − ηg/√s`."""

    initial_accumulator: float = 0.1

    kind: ClassVar[str] = "adagrad"
    at_least_zero: ClassVar[tuple[str, ...]] = ("initial_accumulator",)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `s`."""
        return {"accumulator": (shape, self.initial_accumulator)}

    def step(self, name: str, c: Array, g: Array, state: State, rate: float, work: Array) -> None:
        """Take one step; an `s` of 0 stands for a `g` of 0, which moves nothing."""
        s = state["accumulator"]
        np.multiply(g, g, out=work)
        np.add(s, work, out=work)
        np.copyto(s, work)
        np.sqrt(work, out=work)
        np.maximum(work, 1e-10, out=work)
        np.divide(g, work, out=work)
        np.multiply(work, rate, out=work)
        _subtract(c, work)


@dataclass(frozen=True)
class Adam(_Elementwise):
    """`m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`, `c ← c − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m/(√v + ε)`."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    kind: ClassVar[str] = "adam"
    alone: ClassVar[bool] = True  # `m` of one step over `√v` of another has no bound
    above_zero: ClassVar[tuple[str, ...]] = ("epsilon",)
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Keep `m`, `v` and `t`."""
        return {"m": (shape, 0.0), "v": (shape, 0.0), "t": ((1,), 0.0)}

    def advance(self, state: State) -> None:
        """`t ← t + 1`."""
        state["t"][0] += 1

    def step(self, name: str, c: Array, g: Array, state: State, rate: float, work: Array) -> None:
        """Take one step."""
        m, v, t = state["m"], state["v"], float(state["t"][0])
        np.multiply(g, g, out=work)
        np.subtract(work, v, out=work)
        np.multiply(work, 1 - self.beta2, out=work)
        np.add(v, work, out=work)  # v + (1−β₂)(g² − v)
        np.copyto(v, work)
        np.subtract(g, m, out=work)
        np.multiply(work, 1 - self.beta1, out=work)
        np.add(m, work, out=work)
        np.copyto(m, work)
        np.sqrt(v, out=work)
        np.add(work, self.epsilon, out=work)
        np.divide(m, work, out=work)
        np.multiply(work, rate * (1 - self.beta2**t) ** 0.5 / (1 - self.beta1**t), out=work)
        _subtract(c, work)
