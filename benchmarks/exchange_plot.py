"""The plot of the exchange benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from exchange_report import TARGET_SIZE, TARGETS, Row
from exchange_worker import RULES
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLOURS = dict(zip(RULES, ("#1f6fb2", "#c8553d", "#2a9d6f", "#8a63b8"), strict=True))
GREY = "#666666"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw memcpys per exchange by number of workers, a panel per size."""
    done = [row for row in rows if not row.note and row.case.tensors == 1]
    sizes = sorted({row.case.parameters for row in done})
    counts = sorted({row.case.workers for row in done})
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.3 * len(sizes), 3.9), dpi=150, layout="constrained")
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for panel, size in zip(panels, sizes, strict=True):
            _lines(panel, [row for row in done if row.case.parameters == size], counts)
            panel.set_title(f"{size / 1e6:g} M parameters ({4 * size / 1e6:g} MB)", fontsize=9.5)
            panel.set_xlabel("workers")
            panel.set_xticks(range(len(counts)), [str(n) for n in counts])
            panel.set_xlim(-0.45, len(counts) - 0.55)
            if size == TARGET_SIZE:
                panel.set_xlim(left=-0.9)
                _targets(panel)
        panels[0].set_ylabel("exchange ÷ one memcpy alone")
        panels[0].set_yscale("log", base=2)
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        figure.legend(handles=_legend(), loc="outside upper center", ncols=6, frameon=False)
        figure.savefig(path)


def _lines(panel: Axes, rows: Sequence[Row], counts: Sequence[int]) -> None:
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)
    places = [(rule, locked) for rule in RULES for locked in (True, False)]  # the last: nowhere
    for place, (rule, locked) in enumerate(places):
        line = [row for row in rows if (row.case.rule, row.case.locked) == (rule, locked)]
        if not line:  # skipped
            continue
        at = [counts.index(row.case.workers) + 0.04 * (place - 3) for row in line]
        low, median, high = zip(*(row.alone for row in line), strict=True)
        colour = COLOURS[rule]
        panel.vlines(at, low, high, color=colour, linewidth=1, alpha=0.6)
        panel.plot(
            at,
            median,
            linestyle="-" if locked else "--",
            marker="o",
            color=colour,
            markerfacecolor=colour if locked else "white",
            markersize=4,
            linewidth=1.4,
        )


def _targets(panel: Axes) -> None:
    """Short thin lines, for one worker."""
    for (rule, workers), memcpys in TARGETS.items():
        if workers == 1:
            colour, at = COLOURS[rule], (-0.85, memcpys)
            panel.hlines(memcpys, -0.85, 0.4, color=colour, linewidth=0.8)
            crowded = any(0 < other - memcpys < 0.5 for other in TARGETS.values())
            text, place = f"target {memcpys:g}", (0, -9 if crowded else 2)
            panel.annotate(text, at, place, textcoords="offset points", fontsize=7.5, color=colour)


def _legend() -> list[Line2D]:
    rules = [Line2D([], [], color=colour, label=rule) for rule, colour in COLOURS.items()]
    locked = Line2D([], [], color=GREY, marker="o", markersize=4, label="locked")
    free = Line2D(
        [], [], color=GREY, marker="o", markersize=4, markerfacecolor="white", linestyle="--",
        label="not locked",
    )  # fmt: skip
    return [*rules, locked, free]
