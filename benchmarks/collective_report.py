"""What the collective benchmark says: the targets, a table, a section of a page, and the plot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from collective_worker import RULES, Case, Times
from exchange_plot import GREY
from exchange_report import Check, Quartiles
from matplotlib.figure import Figure
from pages import facts, markdown

TARGET = 1.1
TARGET_SIZE = 25_000_000
HEADING = "## What an exchange costs"
COLUMNS = (
    "ranks",
    "rule",
    "bare all-reduce, ms",
    "exchange, ms",
    "÷ bare",
    "quartiles",
    "its all-reduce, ms",
    "passes over memory, ms",
    "in memcpys",
)
COLOURS = {"averaging": "#c8553d", "elastic": "#1f6fb2"}


@dataclass(frozen=True)
class Row:
    """A rule in a process group."""

    case: Case
    rule: str
    bare: Quartiles  # ms
    exchange: Quartiles  # ms
    ratio: Quartiles  # exchange ÷ bare, of the same rank and round
    adding: Quartiles  # ms
    around: Quartiles  # ms, the rest of the exchange
    memcpy: Quartiles  # ms, by all ranks at once

    @classmethod
    def of(cls, case: Case, rule: str, times: Sequence[Times]) -> Row:
        """Compare round by round, on every rank."""
        bare = [second for t in times for second in t.bare]
        exchange = [second for t in times for second in t.exchange[rule]]
        adding = [second for t in times for second in t.adding[rule]]
        pairs = list(zip(exchange, adding, strict=True))
        return cls(
            case,
            rule,
            _ms(bare),
            _ms(exchange),
            Quartiles.of(e / b for e, b in zip(exchange, bare, strict=True)),
            _ms(adding),
            _ms(whole - part for whole, part in pairs),
            _ms(second for t in times for second in t.memcpy),
        )

    @property
    def check(self) -> Check:
        """Compare with the target."""
        ranks = f"{self.case.ranks} ranks"
        measured = f"{self.ratio.median:.2f} ({self._spread})"
        for_us = self.case.parameters >= TARGET_SIZE
        met = self.ratio.median <= TARGET if for_us else None
        return Check(f"{self.rule}, {ranks}", f"at most {TARGET:g} times bare", measured, met)

    @property
    def _spread(self) -> str:
        return f"{self.ratio.low:.2f} to {self.ratio.high:.2f}"

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        head = [str(self.case.ranks), self.rule, str(self.bare), str(self.exchange)]
        ratio = [f"{self.ratio.median:.2f}", self._spread]
        memcpys = f"{self.around.median / self.memcpy.median:.1f}"
        return [*head, *ratio, str(self.adding), str(self.around), memcpys]


def section(rows: Sequence[Row], command: str, load: float) -> str:
    """Return the section of the page."""
    case = rows[0].case
    size = f"{case.parameters / 1e6:g} M float32 parameters ({4 * case.parameters / 1e6:g} MB)"
    return "\n".join(
        [
            HEADING,
            "",
            f"Made by `{command}`. {facts()} {size}, gloo over this machine's loopback, "
            f"{case.rounds} rounds. {_load(load)}",
            "",
            "![An exchange against a bare all-reduce of the same buffer](collective.svg)",
            "",
            _READING,
            "",
            *markdown(
                ("", "what", "target", "measured"),
                ([c.mark, c.what, c.target, c.measured] for c in (row.check for row in rows)),
            ),
            "",
            *markdown(COLUMNS, (row.cells() for row in rows)),
            "",
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each exchange as its two parts, beside the bare all-reduce."""
    groups = sorted({row.case.ranks for row in rows})
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.6 * len(groups), 3.6), dpi=150, layout="constrained")
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for panel, ranks in zip(panels, groups, strict=True):
            shown = [row for row in rows if row.case.ranks == ranks]
            bare = shown[0].bare.median
            panel.bar(0, bare, 0.6, color=GREY, alpha=0.6)
            for place, row in enumerate(shown, 1):
                colour, adding = COLOURS[row.rule], row.adding.median
                panel.bar(place, adding, 0.6, color=colour, alpha=0.8)
                panel.bar(place, row.around.median, 0.6, bottom=adding, color=colour, alpha=0.4)
                panel.vlines(place, row.exchange.low, row.exchange.high, color="#222222")
            panel.axhline(TARGET * bare, color=GREY, linewidth=0.9, linestyle="--")
            panel.set_xticks(range(len(shown) + 1), ["bare", *(row.rule for row in shown)])
            panel.set_title(f"{ranks} ranks; dashed: {TARGET:g} times bare", fontsize=9.5)
            panel.set_axisbelow(True)
            panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        panels[0].set_ylabel("ms (pale: passes over memory)")
        figure.savefig(path)


def rows_of(case: Case, times: Sequence[Times]) -> list[Row]:
    """Return the rows of a process group."""
    return [Row.of(case, rule, times) for rule in RULES]


def _ms(seconds: Iterable[float]) -> Quartiles:
    return Quartiles.of(1e3 * second for second in seconds)


def _load(load: float) -> str:
    """Say how busy the machine was before it began."""
    return f"The load before it began was {load:.1f} (of {os.cpu_count()} cores)."


_READING = """\
Every rank is a process on this machine. In each round all of them make a bare `all_reduce` of a
buffer of the same size, an exchange of model averaging and one of elastic averaging, each after a
barrier; who is first changes. Figures are medians over all ranks and rounds. *Passes over memory*
is what is left of an exchange without its own all-reduce: `x` is divided and written into the
buffer that is sent, and looked through for NaN on the way (averaging), or `δ` is made and `x` moved
(elastic); and under averaging the sum is copied to `x`. The center itself is never copied: the
buffer in which the sum arrives is the next center. *In memcpys* is that time over a memcpy of the
model by all ranks at once.

On a loopback, sending is copying too, done by the same cores, so that a pass over memory counts as
much here as it ever can. `x` and the center are two buffers, and an all-reduce fills only one: a
memcpy to the other alone takes more than the tenth that the target allows. Sending the buffer in
chunks, each made while the one before it travels, was tried: it costs the cores as much. Over a
network the passes take as long as here, while the wire alone needs 80 ms for 100 MB between two
hosts at 10 Gbit/s, and 800 ms at 1 Gbit/s: see [two hosts](two-hosts.md). With `overlap=True`
training goes on meanwhile."""
