"""What the Ray benchmark says: the target, a table, a page, and the plot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from exchange_plot import GREY
from exchange_report import Check, Quartiles
from matplotlib.figure import Figure
from pages import facts, markdown
from ray_exchange_worker import Case, Times

TARGET = 1.5
TARGET_SIZE = 25_000_000
COLUMNS = (
    "rule",
    "workers",
    "shards",
    "memcpy, ms",
    "least on Ray, ms",
    "in as many parts, ms",
    "exchange, ms",
    "÷ least",
    "quartiles",
    "÷ in parts",
)
COLOURS = {1: "#1f6fb2", 2: "#c8553d", 4: "#5b8c5a"}


@dataclass(frozen=True)
class Row:
    """A center with so many workers and shards."""

    case: Case
    memcpy: Quartiles  # ms
    least: Quartiles  # ms
    parts: Quartiles  # ms, the least in as many parts as there are shards
    exchange: Quartiles  # ms
    ratio: Quartiles  # exchange ÷ least, of the same worker and round
    to_parts: Quartiles  # exchange ÷ parts

    @classmethod
    def of(cls, case: Case, times: Sequence[Times]) -> Row:
        """Compare round by round, of every worker."""
        least = [second for t in times for second in t.least]
        parts = [second for t in times for second in t.parts]
        exchange = [second for t in times for second in t.exchange]
        return cls(
            case,
            _ms(second for t in times for second in t.memcpy),
            _ms(least),
            _ms(parts),
            _ms(exchange),
            Quartiles.of(e / b for e, b in zip(exchange, least, strict=True)),
            Quartiles.of(e / b for e, b in zip(exchange, parts, strict=True)),
        )

    @property
    def check(self) -> Check:
        """Compare with the target."""
        met = self.ratio.median <= TARGET if self.case.parameters >= TARGET_SIZE else None
        what = f"{self.case.rule}, {self.case.workers} workers, {self.case.shards} shards"
        measured = f"{self.ratio.median:.2f} ({self._spread})"
        return Check(what, f"at most {TARGET:g} times the least", measured, met)

    @property
    def _spread(self) -> str:
        return f"{self.ratio.low:.2f} to {self.ratio.high:.2f}"

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        times = (self.memcpy, self.least, self.parts, self.exchange)
        where = self.case.rule, str(self.case.workers), str(self.case.shards)
        head = [*where, *map(str, times)]
        return [*head, f"{self.ratio.median:.2f}", self._spread, f"{self.to_parts.median:.2f}"]


def page(rows: Sequence[Row], command: str, load: float) -> str:
    """Return the page."""
    case = rows[0].case
    size = f"{case.parameters / 1e6:g} M float32 parameters ({4 * case.parameters / 1e6:g} MB)"
    return "\n".join(
        [
            "# An exchange on Ray, against the least that Ray needs for the same bytes",
            "",
            f"Made by `{command}`. {facts('ray')} {size}, one Ray node on this "
            f"machine. The load before it began was {load:.1f} (of {os.cpu_count()} cores).",
            "",
            "![An exchange against the least on Ray](ray-exchange.png)",
            "",
            _READING,
            "",
            _verdict(rows),
            "",
            *markdown(COLUMNS, (row.cells() for row in rows)),
            "",
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw milliseconds against shards, one line per number of workers."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, 3.4), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        elastic = [row for row in rows if row.case.rule == "elastic"]
        for workers in sorted({row.case.workers for row in elastic}):
            shown = [row for row in elastic if row.case.workers == workers]
            shards, colour = [row.case.shards for row in shown], COLOURS[workers]
            label = f"{workers} worker{'s' * (workers > 1)}"
            middle = [row.exchange.median for row in shown]
            left.plot(shards, middle, "o-", color=colour, label=label)
            least = [row.least.median for row in shown]
            left.plot(shards, least, "--", color=colour, alpha=0.6)
            right.plot(shards, [row.ratio.median for row in shown], "o-", color=colour)
            low, high = [row.ratio.low for row in shown], [row.ratio.high for row in shown]
            right.fill_between(shards, low, high, color=colour, alpha=0.12, linewidth=0)
        right.axhline(TARGET, color=GREY, linewidth=0.9, linestyle="--")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
            panel.set_xlabel("shards")
            panel.set_ylim(bottom=0)
            panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        left.set_title("ms per exchange (dashed: the least)", fontsize=9.5)
        right.set_title("exchange ÷ least (dashed: the target)", fontsize=9.5)
        figure.legend(frameon=False, loc="outside upper center", ncols=len(COLOURS))
        figure.savefig(path)


def _verdict(rows: Sequence[Row]) -> str:
    met = sum(row.ratio.median <= TARGET for row in rows)
    return f"The target is {TARGET:g} times the least; {met} of {len(rows)} cases meet it."


def _ms(seconds: Iterable[float]) -> Quartiles:
    return Quartiles.of(1e3 * second for second in seconds)


_READING = """\
The *least* is one `ray.put` of the buffer, an actor that gets it and returns a buffer of the same
size, and one `ray.get` of that. *In as many parts* is the same with an actor and a part of the
buffer for every shard. An exchange adds what is its own: the shard makes `c ← c + α(x − c)`, the
worker makes `x ← x − α(x − c)`. All workers exchange at the same moment here, which is the worst
case: workers that train come when they come.

Between processes of one machine Ray sends nothing: a put is a copy, a get is none, and so the
least is two copies. With a shard on the worker's own machine an exchange sends no whole messages
either. Under **elastic averaging and AGN** they go through memory that the worker lends, a piece of
2 MB at a time, which the shard merges and answers while it is in cache, and while the worker fills
the next. Under **averaging** the shard lends: a worker writes `x` into a room of its own, and when
the round is closed it copies the mean out of the center itself, while the shard still makes the
rest of it. That is one pass more than the others need, and shows most where there is one worker and
one shard: before the round is closed the shard has nothing to do. Every shard is one more call
there (on two cores eight calls to actors that do nothing take 3.6 ms, one takes 0.75); under the
other rules a shard is called to the first exchange and stays in the worker's memory for the next.
And more shards are more memory on the way than the caches hold. Between machines
[an exchange takes little more than its bytes](two-hosts.md).

On one machine alone the center in shared memory is the one to use, which `springline run` does
without `--address`: an exchange takes [two to three memcpys](exchange.md).

The plot is of elastic averaging."""
