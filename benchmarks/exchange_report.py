"""What the exchange benchmark says: a table, the targets and a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from exchange_worker import RULES, Case, Times
from rich.table import Table

from springline.center.layout import BLOCK, SHARDS

TARGETS = {  # memcpys, by rule and workers
    ("elastic", 1): 2.0,
    ("averaging", 1): 3.1,
    ("AGN, SGD", 1): 2.8,
    ("DiLoCo", 2): 6.0,
}
LONGEST = 1.3  # of a fragment's pause, against an even share of the whole model's
TARGET_SIZE = 25_000_000
COUNTERS = 64 * 1024  # bytes that a center may have for its counters and for alignment
SMALL = 64 * 1024  # bytes: Python's own objects, and no array of a block
COLUMNS = (
    "model (tensors)",
    "rule",
    "lock",
    "workers",
    "ms",
    "÷ memcpy alone",
    "its quartiles",
    "÷ memcpy by all",
    "center, models",
    "n",
)


class Quartiles(NamedTuple):
    """The median and what is around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quartiles:
        """Take the quartiles of some values."""
        return cls(*(float(q) for q in np.percentile(list(values), (25, 50, 75))))

    def __str__(self) -> str:
        return _short(self.median)

    @property
    def spread(self) -> str:
        """The quartiles around the median."""
        return f"{_short(self.low)} to {_short(self.high)}"


_NOTHING = Quartiles(0, 0, 0)


@dataclass(frozen=True)
class Row:
    """The result of a case, over all its workers, or a note why there is none."""

    case: Case
    note: str = ""
    exchange: Quartiles = _NOTHING  # ms
    memcpy: Quartiles = _NOTHING  # ms, alone
    alone: Quartiles = _NOTHING  # exchange ÷ memcpy alone
    together: Quartiles | None = None  # exchange ÷ memcpy by all workers at once
    center_nbytes: int = 0
    allocated: int = 0
    step: float = 0.0
    longest: float = 0.0  # of the fragments, exchange ÷ memcpy alone

    @classmethod
    def of(cls, case: Case, times: Sequence[Times], center_nbytes: int) -> Row:
        """Divide every exchange by the median memcpy of its own block."""
        alone, together, exchange, milliseconds = [], [], [], []
        for b in range(case.blocks):  # the exchanges of a case with fragments: one in each block
            block = [second for t in times for second in t.exchange[b]]
            milliseconds += [1e3 * second for second in block]
            exchange += [second / float(np.median(times[0].alone[b])) for second in block]
            alone += [1e3 * second for second in times[0].alone[b]]
            if case.workers > 1:
                by_all = float(np.median([second for t in times for second in t.together[b]]))
                together += [second / by_all for second in block]
        return cls(
            case,
            exchange=Quartiles.of(milliseconds),
            memcpy=Quartiles.of(alone),
            alone=Quartiles.of(exchange),
            together=Quartiles.of(together) if together else None,
            center_nbytes=center_nbytes,
            allocated=max(t.allocated for t in times),
            step=max(t.step for t in times),
            longest=max(
                float(np.median(exchange[k :: case.fragments])) for k in range(case.fragments)
            ),
        )

    @property
    def by_all(self) -> Quartiles:
        """Exchange ÷ memcpy by all workers at once."""
        return self.together or self.alone

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        case = self.case
        size = f"{case.parameters / 1e6:g} M" + f" ({case.tensors})" * (case.tensors > 1)
        fragments = f", {case.fragments} fragments" * (case.fragments > 1)
        head = [size, case.rule + fragments, "yes" if case.locked else "no", str(case.workers)]
        if self.note:
            return [*head, "skipped", *[""] * 5]
        return [
            *head,
            str(self.exchange),
            str(self.alone),
            self.alone.spread,
            str(self.by_all),
            f"{self.center_nbytes / case.nbytes:.2f}",
            str(case.blocks * case.each * case.workers),
        ]


@dataclass(frozen=True)
class Check:
    """One target and what was measured."""

    what: str
    target: str
    measured: str
    met: bool | None  # None: not measured in this run

    @property
    def mark(self) -> str:
        """A sign that is read at a glance."""
        return {True: "✓", False: "✗", None: "?"}[self.met]


def checks(rows: Sequence[Row]) -> Iterator[Check]:
    """Compare with every target that the rows can tell about."""
    done = [row for row in rows if not row.note]
    for (rule, workers), memcpys in TARGETS.items():
        what = f"{rule}, 25 M, {workers} worker" + "s, each against a memcpy by all" * (workers > 1)
        target = f"at most {memcpys} memcpys"
        wanted = (rule, True, workers, TARGET_SIZE, 1)
        rows_of = [row for row in done if _key(row.case) == wanted]
        for row in rows_of:
            figure = row.by_all
            yield Check(what, target, f"{figure} ({figure.spread})", figure.median <= memcpys)
        if not rows_of:
            yield Check(what, target, "not in this run", None)
    yield from _fragments(done)
    step = max(row.step for row in done if row.case.workers == 1)
    yield Check("a step that is not due", "under 2 µs", f"{1e6 * step:.2f} µs", step < 2e-6)
    most = max(row.allocated for row in done)
    yield Check(
        "allocated in an exchange after the first",
        "no array: under 64 kB of Python's objects",
        f"{most / 1000:.1f} kB at most",
        most < SMALL,
    )
    for rule in RULES:
        cases = [row for row in done if row.case.rule == rule]
        over = max(row.center_nbytes - row.case.center_nbytes for row in cases)
        of = cases[0].case.settings
        slots = ", one per worker" if of.rounds else ""
        state = len(of.outer.state("", (1,)))
        if state:
            yield _journaled(rule, f"the model, its momentum{slots}", state, over)
            continue
        yield Check(
            f"memory of a center, {rule}",
            f"the model{slots}, nothing more",
            f"{over / 1000:.1f} kB more (counters)",
            over < COUNTERS,
        )


def _fragments(done: Sequence[Row]) -> Iterator[Check]:
    """Compare the longest pause of fragments with that of the whole model."""
    for row in (row for row in done if row.case.fragments > 1):
        whole = next(r for r in done if r.case == replace(row.case, fragments=1))
        share, most = row.longest / whole.longest, LONGEST / row.case.fragments
        yield Check(
            f"{row.case.rule} with {row.case.fragments} fragments, the longest pause",
            f"at most {LONGEST:g}/{row.case.fragments} = {most:.3f} of the whole model's",
            f"{share:.3f}",
            share <= most if row.case.parameters >= TARGET_SIZE else None,
        )


def adam_check(parameters: int, nbytes: int) -> Check:
    """Compare a center of AGN with Adam, whose outer state is two more models."""
    over = nbytes - 3 * 4 * parameters
    return _journaled("AGN with Adam", "the model, Adam's two moments", 2, over)


def _journaled(rule: str, model: str, state: int, over: int) -> Check:
    """Compare a center whose steps go through a journal: a block of each array per shard."""
    return Check(
        f"memory of a center, {rule}",
        f"{model}, and one block of each per shard for the journal",
        f"{over / 1e6:.1f} MB more (journal and counters)",
        over < SHARDS * (1 + state) * BLOCK + COUNTERS,
    )


def table(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal."""
    out = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        out.add_column(name.replace(" ", "\n"), no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before and _group(before.case) != _group(row.case):
            out.add_row()
        out.add_row(*row.cells())
    return out


def page(rows: Sequence[Row], found: Sequence[Check], command: str) -> str:
    """Return the page for the docs."""
    speeds: dict[int, list[float]] = {}
    for row in rows:
        if not row.note:
            speed = row.case.nbytes / row.memcpy.median / 1e6
            speeds.setdefault(row.case.nbytes, []).append(speed)
    memcpys = ", ".join(f"{n / 1e6:g} MB at {np.median(v):.1f} GB/s" for n, v in speeds.items())
    facts = (
        f"{len(os.sched_getaffinity(0))} cores, numpy {np.__version__}, Python "
        f"{platform.python_version()}, one BLAS thread per worker; a memcpy alone: {memcpys}."
    )
    return "\n".join(
        [
            "# What an exchange costs",
            "",
            f"Made by `{command}`: {facts}",
            "",
            "![Exchange in memcpys by number of workers](exchange.svg)",
            "",
            _READING,
            "",
            *_markdown(
                ("", "what", "target", "measured"),
                ([c.mark, c.what, c.target, c.measured] for c in found),
            ),
            "",
            *_markdown(COLUMNS, (row.cells() for row in rows)),
            "",
            *(f"Skipped: {row.case.what}: {row.note}.\n" for row in rows if row.note),
        ]
    )


_READING = """\
An exchange is timed in the worker, waiting for locks and for the others of a round included, and
divided by `np.copyto` of the model's bytes between two private buffers just before it: *alone*
while the other workers were idle, *by all* while every worker made one (the same for one worker),
which is the fairer one where workers share cores.
Figures are medians over the exchanges of all workers, *n* of them, with the quartiles of the first
ratio.
DiLoCo takes Nesterov's steps, whose momentum is always locked. Fragments are exchanged in turn; the
longest pause is the median of the slowest one.
Beyond a size that depends on the cache, libc's memcpy writes past it and is faster per byte, so
that the ratios of the largest model are higher although its exchanges are as fast per byte."""


def _key(case: Case) -> tuple[str, bool, int, int, int]:
    return case.rule, case.locked, case.workers, case.parameters, case.tensors


def _group(case: Case) -> tuple[int, int, str]:
    return case.parameters, case.tensors, case.rule


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cells)} |"
