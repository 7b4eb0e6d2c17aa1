"""How many local steps lie between two exchanges: a number, or a schedule.

In rounds all workers must agree, also one that joins in the middle. So a schedule is a function of
the step at which a period begins, and that step follows from the number of the round alone.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from springline.checks import at_least_one, is_number

MEANING = "It is the number of local steps between two exchanges."
_COMPARED, _SHOWN = 1000, 8  # rounds of a schedule that workers compare; changes that are shown


class Schedule(ABC):
    """A period that changes: `schedule(step)` is the one that begins at that step."""

    @abstractmethod
    def __call__(self, step: int) -> int:
        """Return the period that begins at a step."""


@dataclass(frozen=True)
class Warmup(Schedule):
    """Exchange after every step at first: PostLocalSGD's warm-up.

    Args:
        steps: so many steps.
        then: the period from there on: a number, or another schedule.

    >>> [Warmup(3, then=10)(step) for step in (0, 2, 3)]
    [1, 1, 10]
    """

    steps: int
    then: int | Schedule | Callable[[int], int] = 10

    def __post_init__(self) -> None:
        at_least_one("steps", self.steps, "It is the length of the warm-up.")
        check(self.then)

    def __call__(self, step: int) -> int:
        """Return 1, or what comes then."""
        if step < self.steps:
            return 1
        return self.then(step) if callable(self.then) else self.then


@dataclass(frozen=True)
class QSR(Schedule):
    """The quadratic synchronization rule `H = max(H₀, ⌊(a/η)²⌋)`: Gu et al. 2023, 2310.14423.

    Before the learning rate's peak its peak is used, and no period goes beyond the last step.

    Args:
        base: H₀, the shortest period.
        growth: a; periods grow where the learning rate is below a/√H₀.
        rate: η, the inner learning rate as a function of the step.
        steps: how many steps a worker makes.

    >>> qsr = QSR(4, 0.1, rate=lambda step: 0.05 * (1 - step / 100), steps=100)
    >>> [qsr(step) for step in (0, 50, 90, 99)]
    [4, 16, 10, 1]
    """

    base: int
    growth: float
    rate: Callable[[int], float]
    steps: int

    def __post_init__(self) -> None:
        at_least_one("base", self.base, "It is the shortest period.")
        at_least_one("steps", self.steps, "It is how many steps a worker makes.")
        if not (is_number(self.growth) and 0 < self.growth < math.inf):
            raise ValueError(f"`growth` must be a number > 0. Received: growth={self.growth!r}.")

    @cached_property
    def _peak(self) -> tuple[float, int]:
        """The highest learning rate, and the first step that has it."""
        at = max(range(self.steps), key=lambda step: float(self.rate(step)))
        return float(self.rate(at)), at

    def __call__(self, step: int) -> int:
        """Return the period that begins at a step."""
        left = self.steps - step
        if left <= 1:
            return 1
        peak, at = self._peak
        rate = peak if step < at else float(self.rate(step))
        # No step is left for a longer one; a rate of 0 asks for all of them.
        longest = left if rate <= 0 else int(min((self.growth / rate) ** 2, left))
        return min(max(self.base, longest), left)


Period = int | Schedule | Callable[[int], int]


def typical(period: Period) -> int | None:
    """Return the number that a period is, begins with or comes to; None of a function.

    >>> typical(10), typical(Warmup(3, then=20)), typical(lambda step: 5)
    (10, 20, None)
    """
    if isinstance(period, Warmup):
        return typical(period.then)
    if isinstance(period, QSR):
        return period.base
    return None if callable(period) else int(period)


def check(period: Any) -> None:
    """Refuse what is no period."""
    if not callable(period):
        at_least_one("period", period, MEANING)


class Gaps:
    """The local steps from one exchange to the next.

    Args:
        period: of the whole model.
        fragments: that it is cut into; each is exchanged once in a period.
    """

    def __init__(self, period: Period, fragments: int = 1) -> None:
        self._period = period
        self._fragments = fragments
        self._starts = [0]  # the step at which each round's gap begins

    @property
    def constant(self) -> int | None:
        """The gap, if it is always the same."""
        return None if callable(self._period) else self._period // self._fragments

    def at(self, step: int) -> int:
        """Return the gap that begins at a step."""
        if not callable(self._period):
            return self._period // self._fragments
        period = self._period(step)
        at_least_one("period", period, f"{MEANING} A schedule returned it for step {step}.")
        return -(-int(period) // self._fragments)

    def before_round(self, number: int) -> int:
        """Return the gap that ends with a round; they count from 0."""
        while len(self._starts) <= number:
            self._starts.append(self._starts[-1] + self.at(self._starts[-1]))
        return self.at(self._starts[number])


def described(period: Period, fragments: int) -> int | str:
    """Return a period as workers compare it, and as it is shown.

    >>> described(10, 1), described(Warmup(3, then=10), 1)
    (10, 'Warmup: 1×3 10×997')
    """
    if not callable(period):
        return int(period)
    gaps = Gaps(period, fragments)
    found = [gaps.before_round(0)]
    with suppress(Exception):  # it need not know of steps that are never made
        found.extend(gaps.before_round(number) for number in range(1, _COMPARED))
    runs = [(gap, len(list(same))) for gap, same in groupby(found)]
    shown = " ".join(f"{gap}×{times}" for gap, times in runs[:_SHOWN])
    if runs[_SHOWN:]:
        shown += f" ... ({zlib.crc32(str(found).encode()):08x})"  # for those that differ later
    name = type(period).__name__ if isinstance(period, Schedule) else "schedule"
    return f"{name}: {shown}"
