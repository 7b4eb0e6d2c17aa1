"""What a center's memory holds, and where: the same for every process that maps it.

table     a few counters per rank and per shard
center    c, as the layout says
state     the outer optimizer's, one copy
journal   where steps are made that must happen once or not at all: a block of each shard
slots     one model per worker, for rounds; none for the asynchronous rules
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import ByteRange, Bytes, Kind, Layout, aligned
from springline.center.state import Spec, StateEntry, arrays_of, nbytes_of, per_block, place
from springline.checks import at_least_one, true_or_false
from springline.errors import SettingsError
from springline.rules.rule import Rule
from springline.typed import Count, build

PAGE = 4096
_MOST_WORKERS, _MOST_BYTES = 1 << 16, 1 << 50  # that a file may speak of
# Columns of the table, one row per rank. Each row has one writer at a time: its rank's process.
# CONTRIBUTED is the round that its slot is complete for, SENT its steps with that message, and
# READING the closed round whose slots it may still read.
EXCHANGES, STEPS, NANOSECONDS, SETTLED, CONTRIBUTED, READING, MEMBER_OF, JOINED = range(8)
# When it last exchanged, in seconds; parts that it has exchanged without; whether its process ends.
LAST, LEFT_OUT, ENDS = 8, 9, 10
SPEED = 11  # steps per second, in millionths
SENT = 12
COLUMNS = 16
MILLIONTH = 1_000_000
JOURNAL_WORDS = 3  # per shard; see `journal.py`
# Values of JOINED.
JOINING, HERE, FINISHED = range(3)
# The head, before the rows: the last closed round, whether all have started once, the version that
# the center was restored with, and how it was sealed (see `Member.seal`; 0 if it is not).
CLOSED, STARTED, BASE, SEALED = range(4)


@dataclass(frozen=True)
class Plan:
    """A layout, what all workers agree on, and the state that their rule needs."""

    layout: Layout
    settings: dict[str, Any]
    rounds: bool  # an exchange is a round
    by_entry: bool  # shards and blocks end where parameters do
    cut: bool  # a parameter may be cut into blocks
    journaled: bool  # a step must happen once or not at all
    outer: dict[str, Any]  # what defines the state: its optimizer's kind and settings
    state: tuple[StateEntry, ...]

    @classmethod
    def of(cls, layout: Layout, rule: Rule, use_locking: bool, rounds: bool | None = None) -> Plan:
        """Plan a center for a rule.

        Args:
            layout: the model's.
            rule: the workers'.
            use_locking: whether an exchange is atomic, per shard.
            rounds: whether exchanges are rounds; by default if the rule says so.

        Raises:
            SettingsError: they do not go together.
        """
        true_or_false("use_locking", use_locking)
        outer = rule.outer
        if rounds is None and rule.rounds and rule.adopts_seen:
            raise SettingsError(
                f"The rule {rule.name!r} adopts the center from before a round, which this center "
                "does not keep. Use a process group."
            )
        rounds = rule.rounds if rounds is None else rounds
        pushes = rule.measures_from_base and not rule.rounds
        if rounds and (rule.accumulates or pushes):
            why = (
                "accumulates gradients, and some parameters may have no gradient on some workers"
                if rule.accumulates
                else "takes a step with every worker's message"
            )
            raise SettingsError(
                f"The rule {rule.name!r} {why}, but in a round all workers exchange at once. Start "
                "the script with `springline run`: its shared center takes every rule, and so does "
                "that on a Ray cluster (`--address`)."
            )
        journaled = not (outer.stateless and (outer.replaces or not rounds))
        if journaled and not use_locking:
            raise SettingsError(
                f"The outer optimizer {outer.kind!r} must take its steps one at a time: it has "
                "state, or it steps in rounds, once for all workers. Leave `use_locking=False` out."
            )
        specs: list[Spec] = [
            (index, key, per_block(e, shape, outer), first)
            for index, e in enumerate(layout.entries)
            if e.kind == "parameter"
            for key, (shape, first) in outer.state(e.name, e.shape).items()
        ]
        settings = rule.settings() | {"use_locking": bool(use_locking)}
        by_entry = rule.accumulates or outer.whole or not outer.stateless
        flags = rounds, by_entry, not outer.whole, journaled
        defining = outer.settings() if specs else {}
        defining.pop("learning_rate", None)  # it may change on the way
        return cls(layout, settings, *flags, defining, place(layout, specs))

    @property
    def use_locking(self) -> bool:
        """Whether an exchange is atomic, per part of the center."""
        return bool(self.settings["use_locking"])

    @property
    def workers(self) -> int:
        """The configured number of workers."""
        return int(self.settings["workers"])

    @cached_property
    def shards(self) -> tuple[ByteRange, ...]:
        """The layout's shards."""
        return tuple(self.layout.shards(self.by_entry, self.cut))

    @cached_property
    def fragments(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each fragment's shards."""
        return tuple(
            tuple(k for k, shard in enumerate(self.shards) if shard.fragment == fragment)
            for fragment in range(self.layout.fragments)
        )

    def blocks(self, shard: ByteRange) -> list[ByteRange]:
        """Cut a shard into blocks."""
        return list(self.layout.blocks(shard, self.by_entry, self.cut))

    def room(self, range_: ByteRange) -> int:
        """Return the bytes that a block and its part of the state take in scratch."""
        parts = [range_.nbytes]
        for s in self._state_of_entry.get(range_.entry, ()):
            like_it = s.shape == self.layout.entries[s.parameter].shape
            parts.append(range_.nbytes if self.cut and like_it else s.nbytes)
        return sum(map(aligned, parts))

    @cached_property
    def _state_of_entry(self) -> dict[int | None, list[StateEntry]]:
        found: dict[int | None, list[StateEntry]] = {}
        for s in self.state:
            found.setdefault(s.parameter, []).append(s)
        return found

    @cached_property
    def journal_head(self) -> int:
        """Bytes of the journal's counters: a few per shard, one per block."""
        if not self.journaled:
            return 0
        return aligned(8 * sum(JOURNAL_WORDS + len(self.blocks(shard)) for shard in self.shards))

    @property
    def _journal_nbytes(self) -> int:
        if not self.journaled:
            return 0
        rooms = (max(map(self.room, self.blocks(shard)), default=0) for shard in self.shards)
        return self.journal_head + sum(rooms)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the outer optimizer's state."""
        return nbytes_of(self.state)

    def state_within(self, start: int, stop: int) -> tuple[StateEntry, ...]:
        """Place the state of the parameters that begin in a part of the center, by itself."""
        begin = [e.offset for e in self.layout.entries]
        ours = [s for s in self.state if start <= begin[s.parameter] < stop]
        return place(self.layout, [(s.parameter, s.key, s.shape, s.first) for s in ours])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        *_, (_, stop) = self._regions()
        return stop

    def _regions(self) -> Iterator[tuple[int, int]]:
        at = 0
        slot = self.layout.nbytes + 8 * len(self.layout.entries)  # a message, and its rates
        slots = [slot] * (self.workers if self.rounds else 0)
        table = 8 * COLUMNS * (1 + self.workers) + 4 * 8 * len(self.shards)
        model = self.layout.nbytes
        for size in (table, model, self.state_nbytes, self._journal_nbytes, *slots):
            yield at, at + size
            at += -(-size // PAGE) * PAGE

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {
            "settings": self.settings,
            "rounds": self.rounds,
            "by_entry": self.by_entry,
            "cut": self.cut,
            "journaled": self.journaled,
            "layout": self.layout.to_json(),
            "outer": self.outer,
            "state": [[s.parameter, s.key, list(s.shape), s.first] for s in self.state],
        }

    @classmethod
    def from_json(cls, values: Any) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        plan = build(_Written, values)
        check_saved_settings(plan.settings)
        layout = Layout.from_json(plan.layout)
        if any(parameter >= len(layout.entries) for parameter, *_ in plan.state):
            raise ValueError("it has state of no parameter")
        state = place(layout, [(i, key, tuple(n), first) for i, key, n, first in plan.state])
        if max(layout.nbytes, nbytes_of(state)) > _MOST_BYTES:
            raise ValueError("it is too large")
        flags = plan.rounds, plan.by_entry, plan.cut, plan.journaled
        return cls(layout, plan.settings, *flags, plan.outer, state)


@dataclass(frozen=True)
class _Written:
    """What `Plan.to_json` returns."""

    settings: dict[str, Any]
    rounds: bool
    by_entry: bool
    cut: bool
    journaled: bool
    layout: list[tuple[str, list[Count], str, Kind, Count]]
    outer: dict[str, Any]
    state: list[tuple[Count, str, list[Count], float]]


def differences(ours: Mapping[str, Any], its: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return what differs between two sets of settings: key, ours and the other's."""
    keys = [*ours, *(key for key in its if key not in ours)]
    return [(k, ours.get(k), its.get(k)) for k in keys if ours.get(k) != its.get(k)]


def check_saved_settings(settings: dict[str, Any]) -> None:
    """Refuse settings in a file that no rule has: screens show them.

    Raises:
        ValueError: these.
    """
    rule = build(_Settings, {k: v for k, v in settings.items() if k in _KNOWN})
    if not isinstance(rule.period, str):
        at_least_one("period", rule.period, "")
    at_least_one("workers", rule.workers, "")
    if rule.workers > _MOST_WORKERS:
        raise ValueError(f"workers is {rule.workers}")


@dataclass(frozen=True)
class _Settings:
    """What all rules have, and what we show of some."""

    rule: str
    period: Count | str
    workers: Count
    use_locking: bool
    moving_rate: float | None = None
    outer: dict[str, Any] | None = None


_KNOWN = {field.name for field in fields(_Settings)}


class Memory:
    """Views of one flat memory, as a plan says."""

    def __init__(self, plan: Plan, raw: Bytes) -> None:
        table, center, state, journal, *slots = (raw[start:stop] for start, stop in plan._regions())
        numbers = table.view(np.int64)
        rows = 1 + plan.workers
        self.head = numbers[:COLUMNS]
        self.ranks = numbers[COLUMNS : COLUMNS * rows].reshape(plan.workers, COLUMNS)
        # Per shard: the last round that it holds, and the process that locked it last; the last
        # round of which a block was refused, and the byte of the center where.
        self.reduced, self.holders, refused = np.split(
            numbers[COLUMNS * rows :], np.arange(1, 3) * len(plan.shards)
        )
        self.refused = refused.reshape(-1, 2)
        self.center = center
        self.state = state
        self.journal = journal
        end = plan.layout.nbytes
        self.slots = [slot[:end] for slot in slots]
        self.rates = [slot[end:].view(np.float64) for slot in slots]

    def state_of(self, plan: Plan) -> dict[int, dict[str, NDArray[Any]]]:
        """Return the outer optimizer's arrays by parameter and key."""
        return arrays_of(plan.state, self.state)
