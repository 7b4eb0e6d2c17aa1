"""What the comparison of exchanges says: figures, a page and a plot."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from exchange_systems import Case
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))
from exchange_report import Quartiles
from pages import facts, markdown

COLUMNS = ("workers", "system", "ms", "÷ memcpy by all", "quartiles", "÷ memcpy alone")
VERDICT = ("workers", "peer", "our rule", "on the shared center", "over a process group")
OURS, THEIRS, WIRE = "#1f6fb2", "#c8553d", "#666666"
BARE = "gloo all-reduce"
LIKE = {  # what does the same work: ours, by peer
    "PostLocalSGD": "averaging",
    "torchft LocalSGD": "averaging",
    "torchft DiLoCo": "DiLoCo",
    "torchft DiLoCo, buckets": "DiLoCo",
    "DistributedDataParallel": "averaging",
}


class Row(NamedTuple):
    """An exchange of one system, over all rounds and workers."""

    workers: int
    parameters: int
    rounds: int
    system: str
    ms: list[float]  # quartiles
    by_all: list[float]  # quartiles, in memcpys by all workers at once
    alone: float  # median, in memcpys of one worker

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        memcpys = Quartiles(*self.by_all)
        head = [str(self.workers), self.system, f"{self.ms[1]:.0f}"]
        return [*head, str(memcpys), memcpys.spread, str(Quartiles(0, self.alone, 0))]

    @property
    def ours(self) -> bool:
        """Whether it is springline's."""
        return self.system.startswith("springline")


def rows_of(case: Case, found: Sequence[dict[str, list[float]]]) -> list[Row]:
    """Divide every worker's exchange by the median memcpy of its own round."""
    by_all = np.median([f["memcpy by all"] for f in found], axis=0)
    alone = np.array(found[0]["memcpy alone"])
    rows = []
    for system in found[0]:
        if not system.startswith("memcpy"):
            seconds = np.array([f[system] for f in found])
            ratio = list(Quartiles.of((seconds / by_all).ravel()))
            ms = list(Quartiles.of(1e3 * seconds.ravel()))
            median = float(np.median(seconds / alone))
            rows.append(Row(*case[:1], case.parameters, case.rounds, system, ms, ratio, median))
    return rows


def _median(rows: Sequence[Row], system: str, workers: int) -> float:
    return next(r.by_all[1] for r in rows if (r.system, r.workers) == (system, workers))


def verdict(rows: Sequence[Row]) -> list[str]:
    """Compare each peer with the same work of ours; where a peer wins comes first."""
    found = []
    for row in rows:
        if row.by_all[1] > 0 and (rule := LIKE.get(row.system)):
            names = [f"springline {rule}", f"springline {rule}, process group"]
            ratios = [_median(rows, name, row.workers) / row.by_all[1] for name in names]
            cells = [str(row.workers), row.system, rule, *(f"{ratio:.2f}" for ratio in ratios)]
            found.append((max(ratios), cells))
    found.sort(reverse=True)
    wins = [f"{cells[1]} ({cells[0]} workers)" for worst, cells in found if worst > 1]
    return [
        f"A peer is faster than one of ours here: {', '.join(wins)}."
        if wins
        else "No peer is faster in this run.",
        "Our time as a share of the peer's for the same work; above 1, the peer wins:",
        "",
        *markdown(VERDICT, (cells for _, cells in found)),
        "",
    ]


def page(rows: Sequence[Row], skipped: Sequence[str], command: str, load: float) -> str:
    """Return the page."""
    size = f"{rows[0].parameters / 1e6:g} M float32 parameters"
    return "\n".join(
        [
            "# An exchange beside the peers",
            "",
            "What one exchange costs between the workers of one machine: springline's rules, and",
            "what other systems do at the same place in training.",
            "",
            *verdict(rows),
            "![An exchange of each system, in memcpys](peers-exchange.svg)",
            "",
            f"Made by `{command}`. {facts()} {size} ({4 * rows[0].parameters / 1e6:g} MB), "
            f"{rows[0].rounds} rounds, torchft 0.2.0 where it is named. The load before it "
            f"began was {load:.1f} (of {os.cpu_count()} cores). "
            "Figures: [peers-exchange.jsonl](peers-exchange.jsonl).",
            "",
            _READING,
            "",
            *markdown(COLUMNS, (row.cells() for row in rows)),
            "",
            *(f"{line}\n" for line in skipped),
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each system, a panel for each number of workers."""
    groups = sorted({row.workers for row in rows})
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style | {"svg.hashsalt": path.stem}):
        figure = Figure(figsize=(4.6 * len(groups), 4.2), layout="constrained")
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for panel, workers in zip(panels, groups, strict=True):
            shown = [row for row in rows if row.workers == workers]
            low, median, high = zip(*(row.by_all for row in shown), strict=True)
            places = range(len(shown))
            colours = [
                OURS if row.ours else WIRE if row.system == BARE else THEIRS for row in shown
            ]
            panel.barh(places, median, 0.66, color=colours, alpha=0.85)
            panel.hlines(places, low, high, color="#222222", linewidth=1)
            for place, row in zip(places, shown, strict=True):
                text, at = f"{row.by_all[1]:.1f}", (row.by_all[2], place)
                panel.annotate(text, at, (4, 0), textcoords="offset points", va="center")
            panel.set_yticks(places, [row.system for row in shown])
            panel.set_ylim(len(shown) - 0.5, -0.5)
            panel.set_xlim(0, 1.12 * max(high))
            panel.set_title(f"{workers} workers", fontsize=9.5)
            panel.set_xlabel("in memcpys by all workers")
        figure.savefig(path, metadata={"Date": None})


_READING = """\
Every worker is a process that has all systems at once. In each round all workers make an exchange
of each system, each after a barrier; who is first changes. Parameters are moved in between, as
training does. The time includes waiting for the others, and is divided by a memcpy of the model
by all workers at the same time, of the same round (*by all*), or by one while the others wait
(*alone*). Figures are medians over all workers and rounds.

- **springline**: an exchange of its optimizers (`springline.torch`) with the shared center;
  *process group*: with `center=dist.group.WORLD` over gloo. Elastic, AGN and async DiLoCo wait
  for nobody.
- **gloo all-reduce**: of one flat buffer, nothing else.
- **PostLocalSGD**: `PeriodicModelAverager.average_parameters`.
- **DistributedDataParallel**: forward and backward of one example, less the same under
  `no_sync()`: what every step pays. The others pay once per period.
- **torchft**: `LocalSGD.sync()`, and the inner step at which `DiLoCo` exchanges, with and without
  `use_bucketization`; one lighthouse and one manager per worker for each, with their default
  intervals.

On a loopback sending is copying by the same cores. A shared center sends nothing, which no peer
can do between two machines: there the process group is the comparison."""
