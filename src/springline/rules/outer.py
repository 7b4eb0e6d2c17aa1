"""Outer optimizers: what turns a reduced message into the next center.

A step is pure: it reads the point where the optimizer is and writes the next one, never over what
is there. The caller puts it in place, so that a process which is killed in the middle leaves the
center before the step or after it. Overflow raises: the caller has set numpy to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from springline.checks import is_number

Array = NDArray[Any]
State = Mapping[str, Array]
Shape = tuple[int, ...]
Rate = float | Callable[[int], float]  # a number, or a function of the exchange's number
_SHOWN = 10  # values of such a function that workers compare
_Self = TypeVar("_Self", bound="Outer")


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
        rate: the learning rate of the step: the one that was sent, if the rule says so, else the
            optimizer's own.
        sent: the learning rate that came with the message, if any: the worker's own.
        name: the parameter, where a block belongs to one.
    """

    number: int = 0
    count: int = 1
    staleness: int = 0
    rate: float = 0.0
    sent: float | None = None
    name: str = ""


class Outer(ABC):
    """The contract of an outer optimizer.

    Attributes:
        kind: its name; by default that of the class.
        stateless: whether it keeps nothing: then its steps need no lock.
        whole: whether it must see whole parameters in their own shape, not flat blocks of them.
        replaces: whether the next `c` is the message itself: such a step may be made twice.
        learning_rate: where a worker sends none of its own.
    """

    kind: str
    stateless: bool = True
    whole: bool = False
    replaces: bool = False
    learning_rate: Rate = 0.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__
        if "step" in cls.__dict__ and "step_in_place" not in cls.__dict__:
            cls.step_in_place = Outer.step_in_place  # type: ignore[method-assign]

    def settings(self) -> dict[str, Any]:
        """What all workers must agree on, as JSON values; of a function its first values."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(cast("Any", self))}
        if callable(self.learning_rate):
            values["learning_rate"] = [self.rate("", number) for number in range(_SHOWN)]
        return {"kind": self.kind} | values

    def for_workers(self: _Self, workers: int) -> _Self:
        """Return this optimizer with what depends on the number of workers filled in."""
        return self

    def rate(self, name: str, number: int) -> float:
        """Return the learning rate of a parameter, where a worker sends none of its own.

        Args:
            name: the parameter's.
            number: the exchange's.
        """
        if not callable(self.learning_rate):
            return self.learning_rate
        rate = self.learning_rate(number)
        if not (is_number(rate) and 0 <= rate < np.inf):
            raise ValueError(
                "The outer learning rate must be a finite number >= 0. Received: "
                f"{rate!r} for exchange {number}."
            )
        return float(rate)

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """For a parameter, the shape and first value of each array of state.

        Unless `whole`, an array has the parameter's shape, or (1,): a number per block.
        """
        return {}

    @abstractmethod
    def step(self, now: Point, g: Array, exchange: Exchange, then: Point) -> None:
        """Write all of `then`: the point after `now` and the message `g`."""

    def step_in_place(self, c: Array, g: Array, exchange: Exchange, work: Array) -> bool:
        """Take a step on `c` itself, which `g` is too small to overflow.

        For steps without state, any part of which may stand alone if the process is killed. The
        result must be that of `step`, to the bit; `work` may be `g`. False if nothing was done.
        """
        return False

    def publish(self, point: Point, out: Array) -> Array:
        """Return what workers are given for `c`: `c` itself, or `out`, once it is written.

        With the first state that must be `c`. What is read, saved and evaluated is always `c`.
        """
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


def _plain(value: Any) -> Any:
    """Return a number as a float, and anything else as it is."""
    return float(value) if is_number(value) else value
