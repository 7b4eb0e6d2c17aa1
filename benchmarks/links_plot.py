"""The plot of the benchmark of slow links."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from exchange_plot import GREY
from links_report import Findings, Row
from links_worker import COLLECTIVE, DDP, RAY
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLOURS = {RAY: "#1f6fb2", COLLECTIVE: "#c8553d"}


def draw(found: Findings, path: Path) -> None:
    """Draw the share of computing, and what a worker sends, against τ."""
    periods = sorted({row.case.period for row in found.rows})
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.6, 3.9), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        for kind in COLOURS:
            for overlap in (False, True):
                rows = [
                    row
                    for row in found.rows
                    if (row.case.kind, row.case.overlap) == (kind, overlap)
                    and row.case.workers > 1
                    and not row.case.apart
                ]
                _line(left, rows, [100 * found.share(row) for row in rows])
                expected = [100 * found.expected(row).share for row in rows]
                at = [row.case.period for row in rows]
                left.plot(at, expected, "x", color=COLOURS[kind], markersize=6, clip_on=False)
                _line(right, rows, [row.sent / 1e6 for row in rows])
        ddp = next(row for row in found.rows if row.case.kind == DDP)
        left.axhline(100 * found.share(ddp), color=GREY, linewidth=1.2, linestyle=":")
        right.axhline(ddp.sent / 1e6, color=GREY, linewidth=1.2, linestyle=":")
        left.set_title("% of the time spent computing (×: formula)", fontsize=9.5)
        right.set_title("MB/s that a worker sends", fontsize=9.5)
        for panel in (left, right):
            panel.set_xscale("log")
            panel.set_xticks(periods, [str(period) for period in periods])
            panel.minorticks_off()
            panel.set_xlabel("τ, steps between two exchanges")
            panel.set_ylim(bottom=0)
            panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
            panel.set_axisbelow(True)
        figure.legend(handles=_legend(), loc="outside upper center", ncols=5, frameon=False)
        figure.savefig(path)


def _line(panel: Axes, rows: list[Row], values: list[float]) -> None:
    case = rows[0].case
    panel.plot(
        [row.case.period for row in rows],
        values,
        linestyle="--" if case.overlap else "-",
        marker="o",
        markerfacecolor="white" if case.overlap else COLOURS[case.kind],
        color=COLOURS[case.kind],
        markersize=4,
        linewidth=1.4,
        clip_on=False,
    )


def _legend() -> list[Line2D]:
    kinds = [Line2D([], [], color=colour, label=kind) for kind, colour in COLOURS.items()]
    return [
        *kinds,
        Line2D([], [], color=GREY, label="no overlap", marker="o", markersize=4),
        Line2D(
            [], [], color=GREY, label="overlap", linestyle="--", marker="o", markersize=4,
            markerfacecolor="white",
        ),
        Line2D([], [], color=GREY, label="DDP", linestyle=":"),
    ]  # fmt: skip
