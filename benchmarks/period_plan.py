"""Which runs the benchmark of the period makes, the most important first, and what they tell."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

WHOLE = "whole"  # one process with the batch of all workers, one of which is a worker alone
AVERAGE, ELASTIC, DILOCO = "average", "elastic", "diloco"
DELAYED, PUSHES = "async_diloco", "async_nesterov"
RULES = (AVERAGE, DILOCO, ELASTIC, DELAYED, PUSHES)
Outer = tuple[float, float]  # rate and momentum
MEAN: Outer = (1.0, 0.0)  # with which DiLoCo is averaging


class Family(NamedTuple):
    """What has a learning rate of its own, at each of two periods."""

    workers: int
    rule: str
    outer: Outer | None = None


class Run(NamedTuple):
    """One run, all its workers in lock-step or, if it is real, processes of their own."""

    family: Family
    period: int
    rate: float  # the learning rate's peak
    seed: int = 0
    real: bool = False

    def __str__(self) -> str:
        """In a few words."""
        workers, rule, outer = self.family
        pair = "" if outer is None else f" {outer[0]:g}/{outer[1]:g}"
        kind = " real" if self.real else ""
        return f"{workers}{kind} {rule}{pair} τ={self.period} rate {self.rate:g} seed {self.seed}"


@dataclass(frozen=True)
class Scale:
    """The model and what is tried."""

    steps: int = 400
    workers: tuple[int, ...] = (2, 4, 8)
    anchors: tuple[int, ...] = (5, 50)  # where learning rates are tuned; others take the nearest
    periods: tuple[int, ...] = (200, 1, 20, 10, 100, 2)  # beside them
    rates: tuple[float, ...] = tuple(1e-3 * 2**k for k in range(8))
    first_rate: float = 4e-3
    outers: tuple[Outer, ...] = ((0.7, 0.5), (1.0, 0.5), (0.7, 0.9))
    later: tuple[Outer, ...] = ((0.7, 0.0), (1.0, 0.9))  # where there is time, with two workers
    seeds: tuple[int, ...] = (0, 1)
    model: dict[str, int] = field(
        default_factory=lambda: {
            "layers": 1,
            "width": 64,
            "heads": 2,
            "context": 32,
            "batch": 8,
            "part": 3,
        }
    )

    def to_json(self) -> dict[str, Any]:
        """Return what results must agree on to be compared."""
        return {"steps": self.steps, **self.model}

    def families(self, workers: int, period: int, *, later: bool = False) -> list[Family]:
        """Return what is tried at a period: of more workers only what held with fewer."""
        few, long = workers == self.workers[0], period >= self.anchors[-1]
        pairs = self.outers if few else self.outers[: 1 + long]
        pushed = self.outers[:2] if few else self.outers[long : long + 1]
        asynchronous = (*pushed, MEAN)
        if later:
            return [Family(workers, DILOCO, pair) for pair in self.later]
        return [
            Family(workers, AVERAGE),
            *(Family(workers, DILOCO, pair) for pair in pairs),
            Family(workers, ELASTIC),
            *(Family(workers, DELAYED, pair) for pair in asynchronous),
            *(Family(workers, PUSHES, pair) for pair in pushed[:few]),
        ]


QUICK = Scale(
    steps=8,
    workers=(2,),
    anchors=(2,),
    periods=(4,),
    rates=(1e-2,),
    first_rate=1e-2,
    later=(),
    seeds=(0,),
    model={"layers": 1, "width": 16, "heads": 1, "context": 8, "batch": 2, "part": 900},
)


@dataclass
class Results:
    """The final losses of all runs so far."""

    scale: Scale
    losses: dict[Run, float] = field(default_factory=dict)

    def anchor(self, period: int) -> int:
        """Return the period whose learning rate another takes."""
        return min(self.scale.anchors, key=lambda a: abs(math.log(max(1, period) / a)))

    def tried(self, family: Family, period: int) -> dict[float, float]:
        """Return the losses by learning rate, of the first seed."""
        runs = ((rate, Run(family, period, rate, self.scale.seeds[0])) for rate in self.scale.rates)
        return {rate: self.losses[run] for rate, run in runs if run in self.losses}

    def rate(self, family: Family, period: int) -> float | None:
        """Return the learning rate of a period, once one was tried."""
        if family.rule == PUSHES:
            family = family._replace(rule=DELAYED)
        tried = self.tried(family, 0 if family.rule == WHOLE else self.anchor(period))
        return min(tried, key=lambda rate: (tried[rate], rate), default=None)

    def loss(self, family: Family, period: int, seed: int | None = None) -> float:
        """Return the loss with the best learning rate, by default of the first seed, or NaN."""
        rate = self.rate(family, period)
        seed = self.scale.seeds[0] if seed is None else seed
        return (
            math.nan if rate is None else self.losses.get(Run(family, period, rate, seed), math.nan)
        )

    def best(self, workers: int, rule: str, period: int) -> Family | None:
        """Return the rule's family with the lowest loss at a period."""
        found = {
            family: self.loss(family, period)
            for family in dict.fromkeys(run.family for run in self.losses)
            if family[:2] == (workers, rule)
        }
        found = {family: loss for family, loss in found.items() if not math.isnan(loss)}
        return min(found, key=lambda family: found[family], default=None)

    def wanted(self) -> Iterator[Run]:
        """Yield the runs that can be made now; ask again after each, it changes the answer."""
        scale, (first, *more) = self.scale, self.scale.workers
        everything = (*scale.anchors, *scale.periods)
        for p in (1, first):
            yield from self._tune(Family(p, WHOLE), 0)
        yield from self._tune_all(first)
        yield from self._fill(first, everything[:3])
        yield from self._real(first)
        for p in more:
            yield from self._fill(p, everything[:3])
        yield from self._again(first, scale.anchors)
        yield from self._fill(first, everything[:5])
        for p in more:
            yield from self._tune_all(p)
            yield from self._fill(p, everything[:5])
        for p in scale.workers:
            yield from self._fill(p, everything)
        for p in scale.workers:
            yield from self._again(p, everything)
        yield from self._fill(first, everything, later=True)

    def _missing(self, run: Run) -> Iterator[Run]:
        if run not in self.losses:
            yield run

    def _tune_all(self, workers: int) -> Iterator[Run]:
        for anchor in self.scale.anchors:
            for family in self.scale.families(workers, anchor):
                yield from self._tune(family, anchor)
        yield from self._tune(Family(workers, WHOLE), 0)

    def _tune(self, family: Family, period: int) -> Iterator[Run]:
        """Climb, until the best learning rate is better than its neighbours.

        More workers begin with the rate of fewer, and those in rounds try higher ones only.
        """
        if family.rule == PUSHES:
            return
        rates, rate = self.scale.rates, self.rate(family, period)
        tried = self.tried(family, period)
        if rate is None:
            yield Run(family, period, self._start(family, period))
            return
        at, downwards = rates.index(rate), family.rule == DELAYED
        low = downwards or family.workers <= self.scale.workers[0] or family.rule == ELASTIC
        below, above = rates[max(0, at - 1) : at], rates[at + 1 : at + 2]
        sides = [below] * low + [above] * (not downwards)
        for neighbour in sides:
            if missing := [Run(family, period, r) for r in neighbour if r not in tried]:
                yield from missing
                return  # it decides whether the other side is needed

    def _start(self, family: Family, period: int) -> float:
        """Return the rate of fewer workers, or of another outer pair, or of averaging."""
        fewer = [p for p in (1, *self.scale.workers) if p < family.workers]
        near = [family._replace(workers=p) for p in reversed(fewer)]
        if family.rule == DELAYED:
            like = Family(family.workers, AVERAGE)
            near.append(like if family.outer == MEAN else family._replace(rule=DILOCO))
        pairs = [family._replace(outer=pair) for pair in self.scale.outers if family.outer]
        for like in (*near, *pairs, Family(family.workers, AVERAGE)):
            if rate := self.rate(like, period):
                return rate
        return self.scale.first_rate

    def _fill(
        self, workers: int, periods: tuple[int, ...], *, later: bool = False
    ) -> Iterator[Run]:
        whole = Family(workers, WHOLE)
        yield from self._missing(Run(whole, 0, self.rate(whole, 0) or self._start(whole, 0)))
        for period in periods:
            for family in self.scale.families(workers, period, later=later):
                if later and period in self.scale.anchors:
                    yield from self._tune(family, period)
                rate = self.rate(family, period) or self._start(family, period)
                yield from self._missing(Run(family, period, rate))

    def _real(self, workers: int) -> Iterator[Run]:
        """One of each kind: rounds, and asynchronous ones."""
        anchor = self.scale.anchors[0]
        for rule in (DILOCO, ELASTIC, DELAYED):
            family = Family(workers, rule, None if rule == ELASTIC else self.scale.outers[0])
            if rate := self.rate(family, anchor):
                yield from self._missing(Run(family, anchor, rate, real=True))

    def _again(self, workers: int, periods: tuple[int, ...]) -> Iterator[Run]:
        """Make the best of each rule once more, with other seeds."""
        for seed in self.scale.seeds[1:]:
            for period in periods:
                for rule in RULES:
                    family = self.best(workers, rule, period)
                    rate = family and self.rate(family, period)
                    if family and rate:
                        yield from self._missing(Run(family, period, rate, seed))
            for whole in (Family(1, WHOLE), Family(workers, WHOLE)):
                if rate := self.rate(whole, 0):
                    yield from self._missing(Run(whole, 0, rate, seed))


def load(path: Path, scale: Scale) -> Results:
    """Read the runs of an earlier start, or begin the file."""
    results = Results(scale)
    if not path.exists():
        path.write_text(json.dumps(scale.to_json()) + "\n", "utf-8")
    head, *lines = path.read_text("utf-8").splitlines(keepends=True)
    if json.loads(head) != scale.to_json():
        raise SystemExit(
            f"The runs in {path} are of another model: {head.strip()}. Give `--fresh`."
        )
    for line in lines:
        if line.endswith("\n"):  # else it was cut short
            (workers, rule, outer), *rest = (values := json.loads(line))["run"]
            run = Run(Family(workers, rule, outer and tuple(outer)), *rest)
            results.losses[run] = math.inf if values["loss"] is None else values["loss"]
    return results


def append(path: Path, run: Run, loss: float) -> None:
    """Add a run to the file."""
    values = {"run": run, "loss": round(loss, 5) if math.isfinite(loss) else None}
    text = path.read_text("utf-8")
    path.write_text(text[: text.rfind("\n") + 1] + json.dumps(values) + "\n", "utf-8")
