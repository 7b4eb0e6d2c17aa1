"""A run as a picture: what was logged, against time, steps and bytes exchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from springline.center.plan import Plan
from springline.files import replace as replace_file
from springline.launch_state import LaunchState
from springline.monitor.curves import (
    Timeline,
    is_logarithmic,
    is_strong,
    quantities,
    smooth,
    split_name,
    stack,
)
from springline.monitor.metrics import Floats, Series, read_metrics
from springline.monitor.sources import find_plan
from springline.monitor.words import many, rule_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 4  # at most
_FEW = 40  # lines up to which the center's have a mark each
_POINTS = 2000  # of a line, at most twice as many
_NOISY = 60  # lines from which on a series is smoothed
_WIDTH, _ROW, _DPI = 4.4, 3.1, 120  # inches, of each column and row
# Okabe and Ito: safe for the color-blind. Black is the center's.
_COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]
_DARK = ["black", "#555555", "#8C6D31"]
_LEGEND = 12  # workers that it names at most
_FRONT = 3.0
_MARK = 0.022, 0.04  # room for a restart's mark, in parts of a panel's width and height
_STACK = 0.3  # how high marks are stacked at most, in parts of a panel's height
_GRAY = "#777777"
_STEPS, _BYTES = "steps of a worker", "bytes exchanged by all workers"
_TRIANGLE: dict[str, Any] = {
    "label": "restart",
    "marker": "^",
    "ls": "",
    "ms": 7,
    "mec": "white",
    "mew": 0.6,
    "clip_on": False,
    "zorder": 4,
}
_log = logging.getLogger("springline")


@dataclass(frozen=True)
class _Column:
    """An axis that all quantities are drawn against."""

    label: str
    place: Callable[[Series], Floats]  # of each line
    resumptions: Floats = field(default_factory=lambda: np.empty(0))


def draw(directory: str | Path, path: Path | None = None) -> Path | None:
    """Draw a run.

    Args:
        directory: the run's.
        path: where the picture goes, by default `RUN/plot.png`.

    Returns:
        Where it is; None, with a line in the log, if there is nothing to draw or nothing to draw
        it with.
    """
    directory = Path(directory)
    path = path or directory / "plot.png"
    try:
        import matplotlib.figure  # noqa: F401 - asks whether the extra is there
    except ImportError:
        _log.warning("No plot: matplotlib is missing. Install it: `pip install springline[plots]`.")
        return None
    picture = figure(directory)
    if picture is None:
        _log.warning(
            "No plot: nothing was logged in %s. Call `springline.log(loss=...)`.", directory
        )
        return None
    kind = path.suffix.removeprefix(".") or "png"
    try:
        replace_file(path, lambda file: picture.savefig(file, format=kind))
    except OSError as error:
        _log.warning("No plot: %s cannot be written (%s).", path, error.strerror)
        return None
    return path


def figure(directory: Path) -> Figure | None:
    """Make the picture: a row per quantity, a column for time, steps and bytes each."""
    from matplotlib.figure import Figure

    launch = LaunchState.read(directory)
    starts = {entry.rank: entry.starts for entry in launch.workers} if launch else {}
    metrics = {
        rank: series.with_starts(starts.get(rank, []))
        for rank, series in read_metrics(directory).items()
    }
    rows = list(quantities(metrics).items())[:_ROWS]
    if not rows:
        return None
    plan = find_plan(directory / "center")
    timeline = Timeline(metrics, plan, launch.launches if launch else ())
    columns = _columns(timeline)
    size = max(2, len(columns)) * _WIDTH, 1.0 + _ROW * len(rows)
    picture = Figure(size, dpi=_DPI, layout="constrained")
    grid = picture.subplots(len(rows), len(columns), sharex="col", sharey="row", squeeze=False)
    colors = _colors([name for _, names in rows for name in names], metrics)
    for (quantity, names), axes in zip(rows, grid, strict=True):
        every = [s.values[name] for s in metrics.values() for name in names if name in s.values]
        if is_logarithmic(quantity, np.concatenate(every)):
            axes[0].set_yscale("log")  # before anything is smoothed
        axes[0].set_ylabel(quantity)
        for ax, column in zip(axes, columns, strict=True):
            _draw_quantity(ax, names, metrics, column.place, colors)
            _mark_launches(ax, column.resumptions)
            restarts = {k: column.place(s)[timeline.restarts(s)] for k, s in metrics.items()}
            _mark_restarts(ax, restarts, colors)
    for ax, column in zip(grid[-1], columns, strict=True):
        _label(ax, column.label)
    _title(picture, directory, plan, len(metrics))
    _legend(picture, grid[:, 0])
    return picture


def _columns(timeline: Timeline) -> list[_Column]:
    """Return what the quantities are drawn against; steps and bytes if they were counted."""
    ends = np.array([series.time[-1] for series in timeline.metrics.values()])
    scale, unit = _time_unit(timeline.seconds(ends).max())
    breaks = timeline.resumptions()
    time = _Column(
        f"time, {unit}",
        lambda series: timeline.seconds(series.time) / scale,
        timeline.seconds(breaks) / scale,
    )
    columns = [time]
    if any(series.step.any() for series in timeline.metrics.values()):
        columns.append(_Column(_STEPS, lambda series: series.step.astype(float)))
    if timeline.nbytes(ends).any():
        bytes_at = timeline.nbytes(breaks)
        columns.append(_Column(_BYTES, lambda series: timeline.nbytes(series.time), bytes_at))
    return columns


def _label(ax: Axes, label: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=label == _STEPS))
    if label == _STEPS:
        ax.xaxis.set_major_formatter("{x:,.0f}")
    if label == _BYTES:
        ax.xaxis.set_major_formatter(EngFormatter("B"))


def _draw_quantity(
    ax: Axes,
    names: list[str],
    metrics: dict[int, Series],
    place: Callable[[Series], Floats],
    colors: dict[str | int, Any],
) -> None:
    for name in names:
        strong, (whose, _) = is_strong(name, metrics), split_name(name)
        for rank, series in metrics.items():
            values = series.values.get(name, np.empty(0))
            known = np.isfinite(values)
            if known.any():
                color = colors[whose or name] if strong else colors[rank]
                line = _line(whose or name, color) if strong else _thin_line(rank, whose, color)
                gaps = np.flatnonzero(np.diff(np.cumsum(series.begins)[known])) + 1
                _draw_series(ax, place(series)[known], values[known], gaps, line)
    ax.grid(alpha=0.25, lw=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.02)


def _mark_launches(ax: Axes, at: Floats) -> None:
    for x in at:
        ax.axvline(x, color=_GRAY, lw=0.9, ls=(0, (1, 2)), label="run went on")


def _mark_restarts(ax: Axes, restarts: dict[int, Floats], colors: dict[str | int, Any]) -> None:
    """Mark restarts on the axis, each in its worker's color; those that meet are stacked."""
    every = np.concatenate([*restarts.values()])
    if not len(every):
        return
    left, right = ax.get_xlim()
    levels = stack(every, _MARK[0] * (right - left))
    heights = min(_MARK[1], _STACK / (1 + levels.max())) * levels
    ends = np.cumsum([len(at) for at in restarts.values()])
    for (rank, at), y in zip(restarts.items(), np.split(heights, ends[:-1]), strict=True):
        if len(at):
            ax.plot(at, y, color=colors[rank], transform=ax.get_xaxis_transform(), **_TRIANGLE)


def _draw_series(
    ax: Axes, x: Floats, y: Floats, gaps: NDArray[np.intp], line: dict[str, Any]
) -> None:
    """Draw a line, open or dotted where its worker was dead; a noisy one smoothed, over a faint.

    What is smoothed is what is seen: on a logarithmic axis the logarithms.
    """
    log = ax.get_yscale() == "log"
    seen = np.log(y) if log else y
    width = 2 * (len(y) // 60) + 1 if len(y) >= _NOISY else 1
    mean = np.concatenate([smooth(part, width) for part in np.split(seen, gaps)])
    spread = np.subtract(*np.percentile(seen, [95, 5])) + 1e-6 * np.abs(seen).max()
    noisy = np.median(np.abs(seen - mean)) > 0.01 * spread
    mean = np.exp(mean) if log else mean
    marker = "o" if len(y) <= (_FEW if line["zorder"] == _FRONT else 2) else ""
    if len(y) > 2 * _POINTS:  # more than there are pixels
        some = np.linspace(0, len(y) - 1, _POINTS).astype(int)
        x, y, mean, gaps = x[some], y[some], mean[some], np.searchsorted(some, gaps)
    if line["zorder"] == _FRONT and len(gaps):  # the center lived on, unmeasured
        ends = np.stack([gaps - 1, gaps])
        ax.plot(x[ends], (mean if noisy else y)[ends], color=line["color"], lw=1.0, ls=":")
    x, y, mean = (np.insert(values, gaps, np.nan) for values in (x, y, mean))
    if noisy:
        ax.plot(x, y, color=line["color"], lw=0.6, alpha=0.18)
    ax.plot(x, mean if noisy else y, marker=marker, ms=4, **line)
    empty = np.isnan(np.concatenate([[np.nan], y, [np.nan]]))
    lonely = ~empty[1:-1] & empty[:-2] & empty[2:]  # an incarnation of one value has no line
    if lonely.any() and not marker:
        ax.plot(x[lonely], y[lonely], color=line["color"], marker="o", ms=3, ls="")


def _line(label: str, color: Any) -> dict[str, Any]:
    return {"label": label, "color": color, "lw": 2.2, "zorder": _FRONT}


def _thin_line(rank: int, whose: str, color: Any) -> dict[str, Any]:
    own = whose in ("", "train", "training", "local", "worker")
    label = f"worker {rank}" if own else f"worker {rank} {whose}"
    return {"label": label, "color": color, "lw": 1.1, "ls": "-" if own else "--", "zorder": 2.5}


def _colors(names: Iterable[str], metrics: dict[int, Series]) -> dict[str | int, Any]:
    """Give the center's lines dark colors, workers one of their own, or a shade if many."""
    from matplotlib import colormaps

    strong = {split_name(name)[0] or name for name in names if is_strong(name, metrics)}
    shades: Any = _COLORS
    if len(metrics) > len(_COLORS):
        shades = colormaps["viridis"](np.linspace(0, 0.9, len(metrics)))
    keys: list[str | int] = [*sorted(strong), *metrics]
    dark = [_DARK[k % len(_DARK)] for k in range(len(strong))]
    return dict(zip(keys, [*dark, *shades], strict=False))


def _time_unit(seconds: float) -> tuple[float, str]:
    for limit, scale, unit in ((300, 1.0, "seconds"), (10_800, 60.0, "minutes")):
        if seconds < limit:
            return scale, unit
    return 3600.0, "hours"


def _title(picture: Figure, directory: Path, plan: Plan | None, workers: int) -> None:
    rule = rule_in_words(plan.settings) if plan else "a run"
    count = many(plan.workers if plan else workers, "worker")
    picture.suptitle(f"{rule}, {count}    ({directory.absolute().name})", fontsize=12)


def _legend(picture: Figure, axes: Iterable[Axes]) -> None:
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    workers = [label for label in entries if label.startswith("worker ")]
    if len(workers) > _LEGEND:  # the shades in between explain themselves
        for label in workers[1:-1]:
            del entries[label]
    if "run went on" in entries:
        entries["run went on"] = entries.pop("run went on")
    if entries.pop("restart", None):  # in no worker's color
        entries["restart"] = Line2D([], [], color=_GRAY, **_TRIANGLE)
    columns = min(len(entries), 8)
    picture.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
