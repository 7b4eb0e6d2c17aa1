"""The contract of a rule: four verbs, of which it writes two and its outer optimizer one.

::

    message = rule.contribute(x, a, base, n, out)            # in the worker
    m = mean of weight × message                             # at the center; `reduce`
    rule.outer.step(now, m, exchange, then)                  # at the center
    rule.adopt(x, base, c, work)                             # in the worker

A rule works on *blocks*, runs of elements that stay in cache between the verbs, and knows nothing
of where the center is.

Symbols: `x` a worker's own parameters, `c` the center, `base` (c̃) the worker's last copy of the
center, `a` its accumulated gradient, `p` workers, `τ` the period, `α` the moving rate, `ρ` the
penalty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from springline.checks import at_least_one
from springline.errors import SettingsError
from springline.rules.fragments import Fragments
from springline.rules.outer import Exchange, Outer
from springline.rules.period import Gaps, Period, check, described

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """Hyperparameters that every rule has, and what it does with a block.

    Args:
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step at which a period begins.
        workers: p, the configured number of workers, fixed for the run.
        fragments: into how many parts of about the same size the model is cut, or their parameters
            by name (the beginnings of names will do). Parts are exchanged in turn, one every τ/F
            steps.
    """

    period: Period = 10
    workers: int = 1
    fragments: Fragments = 1

    name: ClassVar[str]
    rounds: ClassVar[bool] = False  # an exchange is a round of all live workers
    accumulates: ClassVar[bool] = False  # the worker keeps `a`; entries without one are skipped
    sends_rates: ClassVar[bool] = False  # the worker's learning rates go with its messages
    adopts_seen: ClassVar[bool] = False  # `adopt` takes `c` from before the step, not after it

    def __post_init__(self) -> None:
        check(self.period)
        at_least_one("workers", self.workers, "It is the number of workers of the run.")
        if not isinstance(self.fragments, Sequence) or isinstance(self.fragments, str):
            at_least_one("fragments", self.fragments, "Or give lists of parameters' names.")
        elif not self.fragments:
            raise SettingsError("`fragments` must not be empty. Leave it out for one fragment.")
        if not callable(self.period) and self.period % self.fragment_count:
            raise SettingsError(
                f"`period` must be a multiple of the number of fragments, {self.fragment_count}: "
                f"one is exchanged every period/fragments steps. Received: period={self.period}."
            )
        if self._has_own_outer and self.outer is not None:
            self._take_outer(self.outer)

    @property
    def _has_own_outer(self) -> bool:
        """Whether the outer optimizer is a field, which the user chooses."""
        return any(field.name == "outer" for field in fields(self))

    def _take_outer(self, outer: Outer) -> None:
        object.__setattr__(self, "outer", outer.for_workers(int(self.workers)))

    if TYPE_CHECKING:  # a field of some rules, a property of others

        @property
        def outer(self) -> Outer:
            """What turns the reduced message into the next center."""

    @property
    def fragment_count(self) -> int:
        """F, into how many fragments the model is cut."""
        return len(self.fragments) if isinstance(self.fragments, Sequence) else self.fragments

    def gaps(self) -> Gaps:
        """Return the steps from one exchange to the next."""
        return Gaps(self.period, self.fragment_count)

    @property
    def delay(self) -> int:
        """Local steps from making a message to adopting the center."""
        return 0

    @property
    def mixing(self) -> float:
        """The share of its own way that a worker keeps when it adopts the center."""
        return 0.0

    @property
    def paced(self) -> bool:
        """Whether a slower worker makes fewer steps in a period."""
        return False

    @property
    def keeps_base(self) -> bool:
        """Whether the worker keeps `base`."""
        return False

    @property
    def penalizes(self) -> bool:
        """Whether the loss gains a penalty, so that every parameter has a gradient."""
        return False

    @property
    def own_rates(self) -> bool:
        """Whether the center steps with the outer learning rate of the worker that has sent."""
        return False

    @property
    def measures_from_base(self) -> bool:
        """Whether a message is what has changed since `base`, which adopting sets to `c`."""
        return self.keeps_base and not self.adopts_seen

    @property
    def belongs_to_a_round(self) -> bool:
        """Whether a worker's message may be contributed to one round only, not to a later one."""
        return self.measures_from_base or self.fragment_count > 1 or callable(self.period)

    @property
    def follows(self) -> bool:
        """Whether an exchange makes the center the worker's own `x`, which stays as it is."""
        return False

    def settings(self) -> dict[str, Any]:
        """What all workers of a center must agree on, as JSON values."""
        period, p = described(self.period, self.fragment_count), int(self.workers)
        settings: dict[str, Any] = {"rule": self.name, "period": period, "workers": p}
        if isinstance(self.fragments, Sequence):
            settings["fragments"] = [list(names) for names in self.fragments]
        elif self.fragments > 1:
            settings["fragments"] = int(self.fragments)
        if self._has_own_outer:
            settings["outer"] = self.outer.settings()
        return settings

    @abstractmethod
    def contribute(self, x: Array, a: Array, base: Array, n: int, out: Array) -> Array:
        """Return the message: `out`, once it is written, or `x` itself.

        `a` holds `n` gradients; `a` and `base` are empty unless the rule keeps them.
        """

    def weight(self, exchange: Exchange) -> float:
        """Return what a message is multiplied by before it is reduced."""
        return 1.0

    @abstractmethod
    def adopt(self, x: Array, base: Array, c: Array, work: Array) -> None:
        """Set `x`, and `base` if the rule keeps it; `work` is scratch of the same shape."""

    def swap(self, x: Array, base: Array, c: Array, work: Array) -> bool:
        """Do all four verbs in one go, where worker and center are in one memory.

        For rules whose verbs compute the same thing on both sides. The result must be theirs, to
        the bit. False if nothing was done, and the verbs are to be called.
        """
        return False

    def penalize(self, g: Array, x: Array, base: Array, work: Array) -> None:
        """Add to the gradient `g` what the rule adds to the loss; by default nothing."""


def reduce(messages: Sequence[Array], weights: Sequence[float], out: Array, work: Array) -> Array:
    """Return the mean of `weight × message`, in the order given: `out`, or the one message itself.

    `out` is written by the last operation only. It may be one of the messages.
    """
    first, *others = messages
    n = len(messages)
    if not others and weights[0] == 1:
        return first
    try:
        total = _weighted(first, weights[0], work)
        for message, weight in zip(others, weights[1:], strict=True):
            np.add(total, message if weight == 1 else message * weight, out=work)
            total = work
        if n & (n - 1):
            np.divide(total, n, out=out)
        else:  # the same, and faster
            np.multiply(total, 1 / n, out=out)
    except FloatingPointError:  # the sum is too large, the mean is not
        np.multiply(first, weights[0] / n, out=work)
        for message, weight in zip(others, weights[1:], strict=True):
            np.add(work, message * (weight / n), out=work)
        np.copyto(out, work)
    return out


def _weighted(message: Array, weight: float, work: Array) -> Array:
    return message if weight == 1 else np.multiply(message, weight, out=work)


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
