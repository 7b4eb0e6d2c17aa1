"""The contract of a rule: what leaves a worker, what the center becomes, what the worker becomes.

A rule is three small functions on arrays and its hyperparameters. It works on *blocks*, runs of
elements that stay in cache between the functions, and knows nothing of where the center is::

    message = rule.contribute(local, c, gradients)   # in the worker
    rule.merge(center, [message, ...], rate)         # where the center lives
    rule.adopt(local, message, c)                    # in the worker

Symbols: `x` a worker's own parameters, `c` the center, `c̃` the worker's copy of the center, `a`
its accumulated gradient, `p` workers, `τ` the period, `α` the moving rate, `ρ` the penalty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from springline.checks import at_least_one
from springline.rules.outer import Outer

Array = NDArray[Any]


@dataclass(slots=True)
class LocalBlock:
    """A worker's side of a block. All are views of the worker's flat buffers."""

    x: Array
    message: Array  # room for what leaves the worker, as long as x
    a: Array = field(default_factory=lambda: np.empty(0))
    copy: Array | None = None  # c̃
    large: bool = True  # whether the message, added to a finite c, may overflow


@dataclass(slots=True)
class CenterBlock:
    """The center's side of a block."""

    c: Array
    work: Array  # room for intermediate results, so that c itself never holds one
    state: Mapping[str, Array] = field(default_factory=dict)  # the outer optimizer's
    name: str = ""  # the parameter, where a block belongs to one
    large: bool = True  # whether adding the messages may overflow


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Hyperparameters that every rule has, and the three functions that it is.

    Args:
        period: τ, local steps between two exchanges.
        workers: p, the configured number of workers, fixed for the run.
    """

    period: int = 10
    workers: int = 1

    name: ClassVar[str]
    synchronous: ClassVar[bool] = False  # an exchange is a round of all live workers
    accumulates: ClassVar[bool] = False  # the worker keeps `a`
    reads_center: ClassVar[bool] = False  # the message depends on `c`
    adopts_message: ClassVar[bool] = False  # the worker adopts its message, not the new `c`

    def __post_init__(self) -> None:
        at_least_one("period", self.period, "It is the number of local steps between exchanges.")
        at_least_one("workers", self.workers, "It is the number of workers of the run.")

    @property
    def outer(self) -> Outer | None:
        """The optimizer that turns a message into a new center, if the rule has one."""
        return None

    @property
    def keeps_copy(self) -> bool:
        """Whether the worker needs `c̃`."""
        return False

    @property
    def follows(self) -> bool:
        """Whether an exchange makes the center the worker's own `x`, which stays as it is."""
        return False

    def settings(self) -> dict[str, Any]:
        """What all workers of a center must agree on, as JSON values."""
        return {"rule": self.name, "period": int(self.period), "workers": int(self.workers)}

    @abstractmethod
    def contribute(self, local: LocalBlock, c: Array, gradients: int) -> Array:
        """Return the message; `c` is the center before the exchange."""

    @abstractmethod
    def merge(self, center: CenterBlock, messages: Sequence[Array], rate: float) -> None:
        """Bring one message (or a round's) into `center.c`.

        A process may be killed between any two stores, and numpy raises where a result is not
        finite: whatever is left must be a usable center, so intermediate results go to
        `center.work`.
        """

    @abstractmethod
    def adopt(self, local: LocalBlock, message: Array, c: Array) -> None:
        """Set `local.x`; `c` is the center after the exchange."""

    def penalize(self, g: Array, x: Array, copy: Array, work: Array) -> None:
        """Add to the gradient `g` what the rule adds to the loss; nothing unless a rule says so."""


def size(values: Array) -> float:
    """Return a block's sum of squares in one pass: NaN if it holds a NaN or an Inf.

    Infinite is the sum of finite values that are too large to be squared. If it is finite, no value
    is above the square root of the largest number, far below that number's last digit: to add such
    a block to a finite one can not overflow.

    >>> with np.errstate(over="raise"):  # as in an exchange
    ...     [size(np.array(x, np.float32)) for x in ([1.0, 2.0], [1.0, 3e38], [1.0, np.inf])]
    [5.0, inf, nan]
    """
    flat = values.ravel()
    try:
        square = float(np.dot(flat, flat))
        if math.isfinite(square):
            return square
    except FloatingPointError:
        pass
    return math.inf if np.isfinite(flat).all() else math.nan


def is_finite(values: Array) -> bool:
    """Whether a block holds no NaN and no Inf."""
    return not math.isnan(size(values))
