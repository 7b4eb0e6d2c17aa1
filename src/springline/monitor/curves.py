"""What a plot shows of the metrics: which quantities, whose they are, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from springline.center.plan import Plan
from springline.monitor.metrics import Floats, Series, is_center
from springline.monitor.sources import gap_of
from springline.progress import BYTES, DISTANCE, OUTER_RATE

_BREAK = 60.0  # seconds without any worker that are left out where no launcher reports a pause
_OWN = (DISTANCE, OUTER_RATE)
_WHOSE = ("train", "training", "test", "local", "worker")


@dataclass(frozen=True)
class Timeline:
    """Seconds of a run, and what its workers had exchanged by then."""

    metrics: dict[int, Series]
    plan: Plan | None
    launches: Sequence[float] = ()  # when each began, if known

    def seconds(self, time: Floats) -> Floats:
        """Return seconds since the first line, without the breaks between two launches of a run."""
        lines, breaks = self._lines
        skipped = np.cumsum(np.where(breaks, np.diff(lines, prepend=lines[0]), 0.0))
        at = np.clip(np.searchsorted(lines, time, side="right") - 1, 0, len(lines) - 1)
        return np.asarray(time - lines[0] - skipped[at], float)

    def resumptions(self) -> Floats:
        """Return when the run went on after a break."""
        lines, breaks = self._lines
        return lines[breaks]

    def restarts(self, series: Series) -> NDArray[np.bool_]:
        """Return with which lines a worker came back, but not when all did after a break."""
        breaks = np.searchsorted(self.resumptions(), series.time, side="right")
        after_a_break = np.diff(breaks, prepend=breaks[0]) > 0
        return series.begins & ~after_a_break

    @cached_property
    def _lines(self) -> tuple[Floats, NDArray[np.bool_]]:
        """When there is any line, and whether it is the first after a break."""
        lines = np.unique(np.concatenate([series.time for series in self.metrics.values()]))
        begins = [series.time[series.begins] for series in self.metrics.values()]
        gaps = np.diff(lines, prepend=lines[0])
        breaks = (gaps > _BREAK) & np.isin(lines, np.concatenate(begins)) & (not self.launches)
        first = np.searchsorted(lines, np.array(self.launches, float))
        breaks[first[(first > 0) & (first < len(lines))]] = True
        return lines, breaks

    def nbytes(self, time: Floats) -> Floats:
        """Return the bytes that all workers had exchanged.

        A worker that logs nothing is taken to be as far as the others on average.
        """
        if self.plan is None:
            return np.zeros_like(time)
        every = [self._bytes_of(series, time) for series in self.metrics.values()]
        done = np.mean(every, axis=0) * max(self.plan.workers, len(every))
        return np.asarray(done, float)

    def _bytes_of(self, series: Series, time: Floats) -> Floats:
        """Return the bytes that a worker had exchanged: as it logged them, else by its steps."""
        plan = self.plan
        if plan is None:
            return np.zeros_like(time)
        logged = series.values.get(BYTES, np.empty(0))
        known = np.isfinite(logged)
        if known.any():
            more = np.diff(logged[known], prepend=0.0)
            more = np.where(more < 0, logged[known], more)  # a restart counts from 0
            at = np.searchsorted(series.time[known], time, side="right")
            return np.asarray(np.concatenate([[0.0], np.cumsum(more)])[at], float)
        gap = gap_of(plan)
        if gap is None:
            return np.zeros_like(time)
        steps = np.interp(time, series.time, np.maximum.accumulate(series.step), left=0)
        return np.asarray(2 * plan.layout.nbytes / plan.layout.fragments * (steps // gap), float)


def split_name(name: str) -> tuple[str, str]:
    """Split what was logged into whose it is and what it measures.

    >>> split_name("center_val_loss"), split_name("val_acc"), split_name("learning_rate")
    (('center val', 'loss'), ('val', 'accuracy'), ('', 'learning_rate'))
    """
    words = name.split("_")
    whose = []
    while len(words) > 1 and (is_center(words[0]) or words[0] in _WHOSE):
        whose.append(words.pop(0))
    return " ".join(whose), "accuracy" if words == ["acc"] else "_".join(words)


def quantities(metrics: dict[int, Series]) -> dict[str, list[str]]:
    """Group the names that were logged by what they measure; loss and accuracy come first.

    What springline adds comes last, the outer learning rate only if it changes.

    A prefix names whose it is: `center_loss`, `val_loss` and `loss` are one quantity.
    """
    found: dict[str, list[str]] = {}
    for series in metrics.values():
        for name, values in series.values.items():
            values = values[np.isfinite(values)]
            still = name == OUTER_RATE and (values == values[:1]).all()
            if values.size and not still:
                names = found.setdefault(split_name(name)[1], [])
                names += [] if name in names else [name]
    found.pop(BYTES, None)
    first = ["loss", "accuracy"]
    order = sorted(found, key=lambda q: first.index(q) if q in first else 2 + (q in _OWN))
    return {quantity: sorted(found[quantity], key=is_center) for quantity in order}


def is_strong(name: str, metrics: dict[int, Series]) -> bool:
    """Whether it is the center's, or only one worker logs it."""
    ranks = [s for s in metrics.values() if np.isfinite(s.values.get(name, np.empty(0))).any()]
    if len(ranks) == 1 and len(metrics) > 1:
        return True
    return name.startswith("center") or (is_center(name) and len(ranks) == 1)


def is_logarithmic(quantity: str, values: Floats) -> bool:
    """Whether a quantity's axis is: a loss that falls far."""
    values = values[np.isfinite(values)]
    return bool(
        quantity.endswith("loss") and values.min() > 0 and values.max() > 100 * values.min()
    )


def smooth(values: Floats, width: int) -> Floats:
    """Return the running mean over `width` values, fewer at both ends; the first stays.

    >>> smooth(np.array([9.0, 3.0, 6.0, 0.0]), 3).tolist()
    [9.0, 6.0, 3.0, 3.0]
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    half = np.minimum(width // 2, at)
    start, stop = at - half, np.minimum(at + half + 1, len(values))
    return np.asarray((total[stop] - total[start]) / (stop - start), float)


def stack(at: Floats, width: float) -> NDArray[np.int_]:
    """Return the level of each mark, so that none covers another of the same level.

    >>> stack(np.array([5.0, 1.0, 1.1, 1.2]), width=0.15).tolist()
    [0, 0, 1, 0]
    """
    levels = np.zeros(len(at), int)
    ends: list[float] = []  # the last mark of each level
    for k in np.argsort(at, kind="stable"):
        free = (level for level, end in enumerate(ends) if at[k] - end >= width)
        levels[k] = next(free, len(ends))
        ends[levels[k] : levels[k] + 1] = [float(at[k])]
    return levels
