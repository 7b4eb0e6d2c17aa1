"""What a center's memory holds, and where: the same for every process that maps it.

table     a few counters per rank and per shard
center    c, as the layout says
state     the outer optimizer's, one copy
slots     one model per worker, for rounds; none for the asynchronous rules
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import ALIGNMENT, Bytes, Kind, Layout, Run
from springline.checks import at_least_one, true_or_false
from springline.rules.rule import Rule
from springline.typed import Count, build

PAGE = 4096
_MOST_WORKERS, _MOST_BYTES = 1 << 16, 1 << 50  # that a file may speak of
Spec = tuple[int, str, tuple[int, ...], float]  # parameter, key, shape, first value
# Columns of the table, one row per rank. Each row has one writer at a time: its rank's process.
EXCHANGES, STEPS, NANOSECONDS, SETTLED, CONTRIBUTED, ADOPTED, MEMBER_OF, JOINED = range(8)
# When it last exchanged, in seconds; parts that it has exchanged without; whether its process ends.
LAST, LEFT_OUT, ENDS = 8, 9, 10
COLUMNS = 16
# What JOINED says of a rank.
JOINING, HERE, FINISHED = range(3)
# The head, before the rows: the last closed round, whether all have started once, the version that
# the center was restored with, and how it was sealed (see `Member.seal`; 0 if it is not).
CLOSED, STARTED, BASE, SEALED = range(4)


@dataclass(frozen=True)
class StateEntry:
    """One array of the outer optimizer's state and its place in the region `state`."""

    parameter: int  # index of the layout's entry
    key: str
    shape: tuple[int, ...]
    first: float
    offset: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def view(self, buffer: Bytes) -> NDArray[Any]:
        """Return the array in the region `state`."""
        part = buffer[self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Plan:
    """A layout, what all workers agree on, and the state that their rule needs."""

    layout: Layout
    settings: dict[str, Any]
    synchronous: bool
    whole: bool  # shards keep parameters whole, for an outer optimizer
    state: tuple[StateEntry, ...]

    @classmethod
    def of(cls, layout: Layout, rule: Rule, use_locking: bool) -> Plan:
        """Plan a center for a rule."""
        true_or_false("use_locking", use_locking)
        outer = rule.outer
        specs: list[Spec] = [
            (index, key, shape, first)
            for index, e in enumerate(layout.entries)
            if outer and e.kind == "parameter"
            for key, (shape, first) in outer.state(e.name, e.shape).items()
        ]
        alone = outer is not None and outer.alone
        settings = rule.settings() | {"use_locking": bool(use_locking) or alone}
        return cls(layout, settings, rule.synchronous, outer is not None, _place(layout, specs))

    @property
    def use_locking(self) -> bool:
        """Whether an exchange is atomic, per part of the center."""
        return bool(self.settings["use_locking"])

    @property
    def workers(self) -> int:
        """The configured number of workers."""
        return int(self.settings["workers"])

    @cached_property
    def shards(self) -> tuple[Run, ...]:
        """The layout's shards."""
        return tuple(self.layout.shards(self.whole))

    @property
    def state_nbytes(self) -> int:
        """Bytes of the outer optimizer's state."""
        return nbytes_of(self.state)

    def state_within(self, start: int, stop: int) -> tuple[StateEntry, ...]:
        """Place the state of the parameters that begin in a part of the center, by itself."""
        begin = [e.offset for e in self.layout.entries]
        ours = [s for s in self.state if start <= begin[s.parameter] < stop]
        return _place(self.layout, [(s.parameter, s.key, s.shape, s.first) for s in ours])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        *_, (_, stop) = self._regions()
        return stop

    def _regions(self) -> Iterator[tuple[int, int]]:
        at = 0
        slots = self.workers if self.synchronous else 0
        table = 8 * COLUMNS * (1 + self.workers) + 2 * 8 * len(self.shards)
        for size in (table, self.layout.nbytes, self.state_nbytes, *[self.layout.nbytes] * slots):
            yield at, at + size
            at += -(-size // PAGE) * PAGE

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {
            "settings": self.settings,
            "synchronous": self.synchronous,
            "whole": self.whole,
            "layout": self.layout.to_json(),
            "state": [[s.parameter, s.key, list(s.shape), s.first] for s in self.state],
        }

    @classmethod
    def from_json(cls, values: Any) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        plan = build(_Written, values)
        check_settings(plan.settings)
        layout = Layout.from_json(plan.layout)
        if any(parameter >= len(layout.entries) for parameter, *_ in plan.state):
            raise ValueError("it has state of no parameter")
        state = _place(layout, [(i, key, tuple(n), first) for i, key, n, first in plan.state])
        if max(layout.nbytes, nbytes_of(state)) > _MOST_BYTES:
            raise ValueError("it is too large")
        return cls(layout, plan.settings, plan.synchronous, plan.whole, state)


@dataclass(frozen=True)
class _Written:
    """What `Plan.to_json` returns."""

    settings: dict[str, Any]
    synchronous: bool
    whole: bool
    layout: list[tuple[str, list[Count], str, Kind]]
    state: list[tuple[Count, str, list[Count], float]]


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that no rule has: whoever watches a run shows them.

    Raises:
        ValueError: these.
    """
    rule = build(_Settings, {k: v for k, v in settings.items() if k in _KNOWN})
    at_least_one("period", rule.period, "")
    at_least_one("workers", rule.workers, "")
    if rule.workers > _MOST_WORKERS:
        raise ValueError(f"workers is {rule.workers}")


@dataclass(frozen=True)
class _Settings:
    """What all rules have, and what we show of some."""

    rule: str
    period: Count
    workers: Count
    use_locking: bool
    moving_rate: float | None = None
    outer: dict[str, Any] | None = None


_KNOWN = {field.name for field in fields(_Settings)}


class Memory:
    """Views of one flat memory, as a plan says."""

    def __init__(self, plan: Plan, raw: Bytes) -> None:
        table, center, state, *slots = (raw[start:stop] for start, stop in plan._regions())
        numbers = table.view(np.int64)
        rows = 1 + plan.workers
        self.head = numbers[:COLUMNS]
        self.ranks = numbers[COLUMNS : COLUMNS * rows].reshape(plan.workers, COLUMNS)
        # Per shard: the last round that it holds, and the process that locked it last.
        self.reduced, self.holders = np.split(numbers[COLUMNS * rows :], 2)
        self.center = center
        self.state = state
        self.slots = slots

    def state_of(self, plan: Plan) -> dict[int, dict[str, NDArray[Any]]]:
        """Return the outer optimizer's arrays by parameter and key."""
        return arrays_of(plan.state, self.state)


def arrays_of(state: Iterable[StateEntry], buffer: Bytes) -> dict[int, dict[str, NDArray[Any]]]:
    """Return an outer optimizer's arrays by parameter and key."""
    arrays: dict[int, dict[str, NDArray[Any]]] = {}
    for entry in state:
        arrays.setdefault(entry.parameter, {})[entry.key] = entry.view(buffer)
    return arrays


def nbytes_of(state: tuple[StateEntry, ...]) -> int:
    """Return how long a buffer with this state is."""
    return state[-1].offset + state[-1].nbytes if state else 0


def _place(layout: Layout, specs: Iterable[Spec]) -> tuple[StateEntry, ...]:
    entries: list[StateEntry] = []
    offset = 0
    for parameter, key, shape, first in specs:
        dtype = layout.entries[parameter].center_dtype
        entries.append(StateEntry(parameter, key, shape, first, offset, dtype))
        offset += -(-entries[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(entries)
