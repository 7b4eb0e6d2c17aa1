"""How long an exchange takes, on paper: docs/choosing-the-period.md says it in words.

>>> setup = Setup(model=100e6, link=12.5e6, round_trip=0.04, step=0.1, period=10, workers=1)
>>> round(setup.exchange(), 2), round(setup.share(), 3), setup.hidden_from
(16.24, 0.058, 163)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from springline.center.layout import BLOCK

TRIPS = 6.0  # round trips in an exchange on Ray: a call, two transfers, and streams gather way
FILL = 0.7  # of the center's links that may be in use, so that exchanges do not queue
EXAMPLES = [(model, mbits) for model in (100e6, 5e9) for mbits in (100, 1_000, 10_000)]
_STEP, _ROUND_TRIP, _PERIOD = 0.5, 0.04, 100  # of the examples


@dataclass(frozen=True)
class Setup:
    """Workers whose exchanges go to a center on machines of its own.

    Args:
        model: B, bytes.
        link: W, bytes per second of a worker's machine, in each direction.
        round_trip: r, seconds.
        step: t, seconds.
        period: τ, steps between two exchanges.
        workers: p.
        machines: M, that hold the center.
        center_link: V, bytes per second of each of those; by default W.
    """

    model: float
    link: float
    round_trip: float
    step: float
    period: int
    workers: int
    machines: int = 1
    center_link: float = 0.0

    @property
    def least(self) -> float:
        """Seconds of an exchange that has the center to itself: `2B/W + k·r`."""
        return 2 * self.model / min(self.link, self._center) + self._trips

    @property
    def together(self) -> float:
        """Seconds of an exchange if all workers come at the same moment, at most."""
        return max(self.least, 2 * self.workers * self.model / self._center + self._trips)

    @property
    def hidden_from(self) -> int:
        """The smallest period with which an exchange is over before the next is due."""
        return math.ceil(self.least / self.step)

    def exchange(self, overlap: bool = False) -> float:
        """Seconds of an exchange, T: the others' share of the center's links is not ours."""
        return self._exchange(self._between(overlap))

    def share(self, overlap: bool = False) -> float:
        """Share of the time that is spent computing."""
        if overlap:
            return 1.0
        return self.period * self.step / self._between(overlap)

    def steps_between(self, overlap: bool = False) -> float:
        """Steps between two exchanges: τ, or its next multiple after an exchange is over."""
        if not overlap:
            return self.period
        return self.period * math.ceil(self.exchange(overlap) / (self.period * self.step) - 1e-9)

    def center_rate(self, overlap: bool = False) -> float:
        """Bytes per second that the center receives; it sends as many."""
        return self.workers * self.model / self._between(overlap)

    @property
    def _trips(self) -> float:
        return TRIPS * self.round_trip

    @property
    def _center(self) -> float:
        return self.machines * (self.center_link or self.link)

    def _exchange(self, between: float) -> float:
        left = self._center - (self.workers - 1) * self.model / between
        return 2 * self.model / min(self.link, left) + self._trips

    def _between(self, overlap: bool) -> float:
        """Seconds between two exchanges of a worker: `τt + T`, or what is longer of both."""
        computing = self.period * self.step

        def too_short(between: float) -> bool:
            its = self._exchange(between)
            return between < (max(computing, its) if overlap else computing + its)

        low = self.workers * self.model / self._center  # the center can do no more
        high = low + computing + self.workers * self.least
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if too_short(middle) else (low, middle)
        return high


def all_reduce(model: float, link: float, round_trip: float, workers: int) -> float:
    """Seconds of a ring's all-reduce: everybody sends `2(p − 1)/p` models in as many hops."""
    hops = 2 * (workers - 1)
    return hops / workers * model / link + hops * round_trip


def machines(model: float, center_link: float, between: float, workers: int) -> int:
    """Machines that a center needs if every worker exchanges once in so many seconds."""
    return math.ceil(workers * model / between / (FILL * center_link))


def colocated(model: float, link: float, between: float, workers: int) -> float:
    """Return how much of a link is in use if the center is spread over the workers' machines.

    Of that of a machine with a shard: there may be more machines than shards.
    """
    shards = min(workers, model // BLOCK)  # none is cut below that
    sent = (1 - 1 / shards) * model + (workers - 1) / shards * model
    return sent / between / link


def example(model: float, mbits: float) -> list[str]:
    """Return a row of the table of docs/choosing-the-period.md."""
    link = mbits * 1e6 / 8
    alone = Setup(model, link, _ROUND_TRIP, _STEP, 1, 1)
    period = max(_PERIOD, alone.hidden_from)
    between = period * _STEP
    cells = [
        f"{model / 1e9:g} GB" if model >= 1e9 else f"{model / 1e6:g} MB",
        f"{mbits / 1e3:g} Gbit/s" if mbits >= 1e3 else f"{mbits:g} Mbit/s",
        f"{alone.least:.1f} s",
        str(alone.hidden_from),
        str(period),
        f"{period * _STEP / (period * _STEP + alone.least):.0%}",
    ]
    for workers in (100, 1_000):
        cells.append(f"{workers * model / between / 1e9:.3g} GB/s")
        cells.append(str(machines(model, link, between, workers)))
    return [*cells, f"{colocated(model, link, between, 1_000):.0%}"]
