"""What the workers of a fault test do under each rule, and what must hold however they die.

Every number here is chosen so that the rule's arithmetic on it is exact, or cannot leave the hull.
"""

from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import numpy as np

from own_rules import EveryFourth, MeanOfPseudoGradients, Pushes, Rolling
from springline.rules import AGN, SGD, ElasticAverage, ModelAverage

WORKERS = 3
SHAPES = {
    "double": ((90_001,), np.float64),
    "all": ((700, 500), np.float32),
    **{f"own{rank}": ((200_003,), np.float32) for rank in range(WORKERS)},
}


@dataclass(frozen=True)
class Snapshot:
    """A center as an observer saw it."""

    values: dict  # by name
    versions: tuple  # before the values were read, and after
    exchanges: tuple  # completed, per rank, before and after
    interrupted: np.ndarray  # per rank, how often it was killed inside an exchange
    live: bool  # whether workers were exchanging meanwhile
    state: dict  # the outer optimizer's, by name and key, if nobody was
    home: Path  # where the workers may have written something down


def first_values(value):
    return {name: np.full(shape, value, dtype) for name, (shape, dtype) in SHAPES.items()}


def fill(arrays, value):
    for array in arrays.values():
        array.fill(value)


def extremes(arrays):
    return min(a.min() for a in arrays.values()), max(a.max() for a in arrays.values())


class Elastic:
    """A worker goes back to its own constant every few exchanges, so that nothing settles.

    With a lock the new `x` and `c` lie between the old ones in floating point too: rounding is
    monotone. Without it `c` may have moved since δ was made from it; each worker has at most one
    such δ under way, and none is larger than α times the hull.
    """

    low, high = 10.0, 12.0
    first = 11.0
    rule = ElasticAverage(period=1, workers=WORKERS, moving_rate=0.125)

    def __init__(self, locking):
        slack = 0.0 if locking else self.rule.alpha * WORKERS * (self.high - self.low)
        self.low, self.high = self.low - slack, self.high + slack

    def before(self, worker):
        if worker.local_step % 8 == 0:
            self._inside(extremes(worker.parameters))
            fill(worker.parameters, 10.0 + worker.rank)

    def after(self, worker):
        """`before` has a look now and then."""

    def check(self, seen):
        self._inside(extremes(seen.values))

    def _inside(self, found):
        assert self.low <= found[0] <= found[1] <= self.high, f"{found} is outside the hull"


class Average:
    """In every round each worker brings a number that tells round and rank, the same everywhere.

    So the center tells which round it holds and over whom, exactly: all means are integers. A
    worker that has just joined may take the round that is under way for its first one.
    """

    first = 0.0
    rule = ModelAverage(period=1, workers=WORKERS)

    def __init__(self, locking):
        self.round = None

    def before(self, worker):
        if self.round is None:
            self.joined = worker.center.version
        fill(worker.parameters, self._number(worker.center.version + 1, worker.rank))

    def after(self, worker):
        this = worker.center.version
        first = self.joined + 1, self.joined + 2
        assert this in (first if self.round is None else (self.round + 1,)), (this, self.round)
        self.round = this
        low, high = extremes(worker.parameters)
        assert low == high, f"round {this} gave rank {worker.rank} {low} and {high}"
        assert low in self._means(this), f"round {this} gave {low}"

    def check(self, seen):
        before, after = seen.versions
        oldest = before - 1 if seen.live else before
        means = np.array([m for this in range(oldest, after + 1) for m in self._means(this)])
        for name, c in seen.values.items():
            wrong = ~np.isin(c, means)
            assert not wrong.any(), f"{c[wrong][:5]} in {name!r}, versions {seen.versions}"
        low, high = extremes(seen.values)
        assert seen.live or low == high, f"the last round left {low} and {high}"

    def _number(self, this, rank):
        return 360.0 * (this % 8192) + 12 + 6 * rank if this > 0 else self.first

    def _means(self, this):
        return {
            sum(numbers) / len(ranks)
            for n in range(1, WORKERS + 1)
            for ranks in combinations(range(WORKERS), n)
            for numbers in product(*[[self._number(this - k, r) for k in (0, 1)] for r in ranks])
        }


class Agn:
    """Rate 1 and integer gradients: the center counts exchanges.

    Each rank has a parameter that nobody else has a gradient for, which is exact without locks
    too. In the others rank r counts by r + 1; without locks they may lose some.
    """

    first = 0.0
    rule = AGN(period=1, workers=WORKERS, outer=SGD(1.0))

    def __init__(self, locking):
        self.locking = locking
        self.gradients = {}

    def before(self, worker):
        if not self.gradients:
            mine = {"double": worker.rank + 1, "all": worker.rank + 1, f"own{worker.rank}": 1}
            self.gradients = {
                name: np.full_like(worker.parameters[name], -g) for name, g in mine.items()
            }
            self.start = worker.parameters[f"own{worker.rank}"].copy()
        worker.observe(self.gradients)

    def after(self, worker):
        if worker.local_step % 8 == 0:
            counted = worker.parameters[f"own{worker.rank}"] - self.start
            assert (counted == worker.local_step).all(), (counted, worker.local_step)

    def check(self, seen):
        under_way = 1 if seen.live else 0
        low, high = seen.exchanges[0], seen.exchanges[1] + seen.interrupted + under_way
        for rank in range(WORKERS):
            self._between(low[rank], seen.values[f"own{rank}"], high[rank])
        weights = np.arange(WORKERS) + 1
        for name in ("double", "all"):
            least = weights @ low if self.locking else 0
            self._between(least, seen.values[name], weights @ high)

    def _between(self, low, c, high):
        found = c.min(), c.max()
        assert low <= found[0] <= found[1] <= high, f"{found} is not within {low} and {high}"


class Own:
    """A rule of the tests' own whose outer optimizer has state; every worker contributes 1.

    So each element of the center tells how many steps it has taken. A step that was made twice, in
    part, or with the state of another one is seen at once.
    """

    first = 0.0

    def __init__(self, locking):
        assert locking, "an outer optimizer with state needs locks"

    def before(self, worker):
        for x in worker.parameters.values():
            np.subtract(x, 1, out=x)

    def after(self, worker):
        """The center tells it all."""

    def check(self, seen):
        low, high = self.steps(seen)
        counts = np.arange(max(0, low), high + 1)
        allowed = self.rule.outer.after(counts)
        for name, c in seen.values.items():
            wrong = ~np.isin(c, allowed)
            assert not wrong.any(), f"{c[wrong][:5]} in {name!r}, not {allowed}"


class Rounds(Own):
    """Every round is one step, whoever is in it."""

    rule = MeanOfPseudoGradients(period=1, workers=WORKERS, outer=Rolling())

    def steps(self, seen):
        before, after = seen.versions
        return before - 1 if seen.live else before, after


class Pushed(Own):
    """Every exchange is one step; of one whose worker was killed some blocks may have it."""

    rule = Pushes(period=1, workers=WORKERS, outer=EveryFourth())

    def steps(self, seen):
        return pushes(seen)


def pushes(seen):
    """How many exchanges an element may hold at least and at most."""
    under_way = WORKERS if seen.live else 0
    low, high = seen.exchanges
    return low.sum(), high.sum() + seen.interrupted.sum() + under_way


SUBJECTS = {"elastic": Elastic, "average": Average, "agn": Agn, "rounds": Rounds, "pushes": Pushed}
