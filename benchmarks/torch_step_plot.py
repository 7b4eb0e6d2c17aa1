"""The plot of the torch benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from exchange_plot import GREY
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch_step_cases import Case
from torch_step_report import TITLES, Row, targets

COLOURS = {"elastic": "#1f6fb2", "averaging": "#c8553d", "AGN": "#2a9d6f", "DiLoCo": "#8a63b8"}
UNITS = {
    "step": "÷ bare optimizer",
    "tiny step": "µs more than the bare optimizer",
    "exchange": "÷ one memcpy of the model",
    "training": "÷ bare training step",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw every figure that has a target, a panel per kind, the target as a line."""
    shown = targets(rows)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.5, 5.6), dpi=150, layout="constrained")
        panels = figure.subplots(2, 2).flat
        for panel, kind in zip(panels, TITLES, strict=True):
            _bars(panel, [row for row in shown if row.case.kind == kind])
            panel.set_title(
                TITLES[kind] + ", exchanged in the background" * (kind == "training"), fontsize=9.5
            )
            panel.set_ylabel(UNITS[kind])
        figure.savefig(path)


def _bars(panel: Axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    ratio = rows[0].case.kind in ("step", "training")
    base = 1.0 if ratio else 0.0
    for place, row in zip(places, rows, strict=True):
        low, median, high = row.figure
        colour = COLOURS[row.case.rule]
        panel.bar(place, median - base, 0.6, bottom=base, color=colour, alpha=0.75)
        panel.vlines(place, low, high, color="#222222", linewidth=1)
    for place, row in zip(places, rows, strict=True):
        most = row.target[0]
        panel.hlines(most, place - 0.5, place + 0.5, color=GREY, linewidth=0.9, linestyle="--")
        if place == len(rows) - 1 or rows[place + 1].target[0] != most:
            panel.annotate(
                f"target: {most:g}",
                (place + 0.5, most),
                (-2, 2),
                textcoords="offset points",
                fontsize=7.5,
                color=GREY,
                horizontalalignment="right",
            )
    if ratio:
        panel.axhline(1.0, color="#222222", linewidth=0.8)
    panel.set_xticks(
        places, [_name(row.case) for row in rows], fontsize=8 if len(rows) < 8 else 5.8
    )
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)


def _name(case: Case) -> str:
    delay = case.in_background if case.delay else ""
    return "\n".join(word for word in (case.rule, case.optimizer, delay) if word)
