"""What the comparison over slow links says: a page and its plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from campaign import LINKS, Records
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from pages import markdown
from races import Case
from systems import SYSTEMS

if TYPE_CHECKING:
    from over_links import Plan

BAR = 0.25  # of DDP's time to its loss, over the slower link
COLOURS = {
    "ddp": "#444444",
    "postlocal": "#999999",
    "torchft": "#c8553d",
    "average": "#2a9d6f",
    "average_overlap": "#8fd0b4",
    "diloco": "#1f6fb2",
    "diloco_overlap": "#7fd1e8",
    "diloco_ray": "#6fa8dc",
    "elastic": "#e0a100",
    "async_diloco": "#8a5fb5",
}
PEERS = ("ddp", "postlocal", "torchft")
Where = tuple[int, str]  # workers and link


class Row(NamedTuple):
    """A system at a place, over all seeds that were run."""

    system: str
    case: Case
    step: list[float]  # seconds
    final: list[float]  # after as many steps as DDP makes
    alone: list[float]  # seconds to one worker's final loss
    whole: list[float]  # seconds to DDP's
    ratio: list[float]  # of that to DDP's own time
    sent: list[float]  # bytes until then


def row_of(plan: Plan, records: Records, where: Where, system: str) -> Row | None:
    """Collect what is known of a system."""
    scale, (workers, link) = records.scale, where
    case = plan.best(records, system, workers, link)
    if case is None:
        return None
    row = Row(system, case, [], [], [], [], [], [])
    for seed in scale.seeds:
        references = [plan.reference(name, workers, scale, seed) for name in ("alone", "whole")]
        run = plan.outcome(records, case._replace(seed=seed))
        first = plan.outcome(records, case._replace(seed=seed, steps=scale.steps))
        ddp = plan.outcome(records, plan.ddp_case(workers, link, scale, seed))
        if (
            ddp is None
            or run is None
            or first is None
            or not all(r in records.runs for r in references)
        ):
            continue
        alone, whole = (records.runs[reference].final for reference in references)
        target = whole * (1 + 1e-9)  # reached by the very run that it is of
        row.step.append(run.others / case.steps)
        row.final.append(first.final)
        row.alone.append(min(run.reached(alone), first.reached(alone)))
        row.whole.append(run.reached(target))
        row.ratio.append(run.reached(target) / ddp.wall)
        row.sent.append(run.reached(target, "sent"))
    return row if row.final else None


def rows_at(plan: Plan, records: Records, where: Where) -> list[Row]:
    """Collect all systems at a place, the fastest first."""
    found = [row_of(plan, records, where, system) for system in plan.systems]
    return sorted(filter(None, found), key=lambda row: (_middle(row.whole), _middle(row.alone)))


def _middle(values: Iterable[float]) -> float:
    return statistics.median(values)


def page(plan: Plan, records: Records, command: str) -> str:
    """Return the page for the docs."""
    scale = records.scale
    places = [(workers, link) for workers in plan.tuned for link in LINKS]
    tables = {where: rows for where in places if (rows := rows_at(plan, records, where))}
    lines = [
        "# Time to a loss over slow links, beside the peers",
        "",
        f"Made by `{command}`: {records.facts()}",
        "",
        *(f"- {_verdict(where, rows)}" for where, rows in tables.items()),
        "",
        _READING.format(steps=scale.steps, seeds=records.seeds()),
        *_models(plan, records),
        "",
    ]
    for workers in plan.tuned:
        lines += [f"![Loss against time and bytes, {workers} workers](peers-links-{workers}.svg)"]
        lines += [""]
    for (workers, link), rows in tables.items():
        lines += [f"## {workers} workers, {link}", "", *_table(plan, records, workers, rows), ""]
    return "\n".join(lines)


def _verdict(where: Where, rows: list[Row]) -> str:
    """Say who was first, the peers before springline."""
    workers, link = where
    first = rows[0]
    words = f"**{workers} workers, {link}**: "
    if math.isinf(_middle(first.whole)):
        return words + "nobody reached the final loss of DistributedDataParallel."
    name = SYSTEMS[first.system].title
    words += f"{'a peer wins: ' * (first.system in PEERS)}{name} is first at the final loss of "
    words += f"DistributedDataParallel, after {_seconds(first.whole)}"
    for title, ours in (("springline's best", True), ("the best peer", False)):
        others = [row for row in rows if (row.system not in PEERS) == ours]
        if others and others[0] is not first and math.isfinite(_middle(others[0].whole)):
            words += f"; {title} is {SYSTEMS[others[0].system].title}, "
            words += f"after {_seconds(others[0].whole)}"
    mine = [_middle(row.ratio) for row in rows if row.system not in PEERS]
    if link == next(iter(LINKS)) and mine:
        met = "met" if min(mine) <= BAR else "not met"
        words += f". Our bar, a quarter of DistributedDataParallel's time, is {met}: "
        words += f"{_number(min(mine), '.2f')}"
    return words + "."


_READING = """\
All train the GPT of `examples/shakespeare.py` with AdamW and a cosine schedule, from the same
values. Every worker is a process on a host of its own, a network namespace behind a link that `tc`
limits. The *loss* is that of what would be saved, on held-out text: the center; with peers the
first worker's model. Copies are kept and evaluated after the run. *Bytes* are those that the first
worker's interface has sent and received, headers and all.

The learning rate's peak (and the outer rate and momentum) are those that the rule was best with at
that period, in one sweep for all: docs/time-to-loss.jsonl for two workers, docs/peers-tuning.jsonl
for four. PostLocalSGD has those of averaging, torchft those of DiLoCo. Each system is run with
every period of the sweep, for {steps} steps and, where that does not reach the loss of
`DistributedDataParallel`, for 1.5 and 2 times as many, with a schedule as long. The row has the run
that was first there. Of {seeds}; with several, times are
medians, with all values behind them.

Where workers wait for each other, the losses do not depend on the link: they are those of one run
of the rule with the same settings (for `DistributedDataParallel` of one process with the batches of
all), at the pace that 60 steps and two periods of each system were timed at on the link. Runs with
`overlap=True`, which exchange in the background and keep the steps that are made meanwhile, and the
asynchronous ones are whole runs on the link. Averaging and DiLoCo have a process group as the
center, the asynchronous ones a center on Ray, on a host of its own.
torchft has a lighthouse, one replica group for each worker, gloo and one bucket, and no delay.
PostLocalSGD averages without a warm-up of gradients, which would cost it time here."""


def _models(plan: Plan, records: Records) -> Iterator[str]:
    for workers in plan.tuned:
        model = records.scale.models[workers]
        sizes = model.sizes
        yield (
            f"{workers} workers: {sizes['layers']} layers, width {sizes['width']}, batch "
            f"{sizes['batch']} each; a step lasts {1e3 * model.seconds:.0f} ms at least: the "
            "worker waits between the layers, so that all can share these cores."
        )


def _table(plan: Plan, records: Records, workers: int, rows: list[Row]) -> Iterator[str]:
    scale, seed = records.scale, records.scale.seeds[0]
    for system, words in (("alone", "One worker"), ("whole", "One process with all batches")):
        run = records.runs.get(plan.reference(system, workers, scale, seed))
        if run:
            yield f"{words} ends at {run.final:.4f} (seed {seed}). "
    yield ""
    columns = ["system", "τ", "rate", "outer", "steps", "ms a step", f"loss, {scale.steps} steps"]
    columns += ["s to one worker's loss", "s to DDP's loss", "÷ DDP's time", "MB to DDP's loss"]
    yield from markdown(columns, (_cells(row) for row in rows))


def _cells(row: Row) -> list[str]:
    case = row.case
    outer = f"{case.outer[0]:g}/{case.outer[1]:g}" if case.outer else ""
    if case.moving_rate is not None:
        outer = f"α = {case.moving_rate:g}"
    return [
        SYSTEMS[row.system].title,
        str(case.period or ""),
        f"{case.rate:g}",
        outer,
        str(case.steps),
        f"{1e3 * _middle(row.step):.0f}",
        _all(row.final, ".4f"),
        _all(row.alone, ".1f"),
        _all(row.whole, ".1f"),
        _all(row.ratio, ".2f"),
        _all([value / 1e6 for value in row.sent], ".0f"),
    ]


def _number(value: float, how: str) -> str:
    return f"{value:{how}}" if math.isfinite(value) else "not reached"


def _all(values: list[float], how: str) -> str:
    """Format the median, and all values if there are several."""
    words = _number(_middle(values), how)
    if len(values) > 1 and any(map(math.isfinite, values)):
        words += f" ({', '.join(_number(value, how) for value in values)})"
    return words


def _seconds(values: list[float]) -> str:
    return f"{_middle(values):.0f} s"


def save(figure: Any, path: Path) -> None:
    """Write a plot, the same bytes for the same figures."""
    with mpl.rc_context({"svg.hashsalt": "springline"}):
        figure.savefig(path, metadata={"Date": None})


def draw(plan: Plan, records: Records, out: Path) -> None:
    """Draw the loss against time and bytes, one figure for each number of workers."""
    for workers in plan.tuned:
        with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(8.4, 6.6), layout="constrained")
            panels = figure.subplots(len(LINKS), 2, sharey=True, squeeze=False)
            for (left, right), link in zip(panels, LINKS, strict=True):
                _draw_place(plan, records, (workers, link), left, right)
            handles, labels = panels[0][0].get_legend_handles_labels()
            if handles:
                figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
            save(figure, out / f"peers-links-{workers}.svg")


def _draw_place(plan: Plan, records: Records, where: Where, left: Any, right: Any) -> None:
    link = where[1]
    target, highest = math.nan, 0.0
    for row in rows_at(plan, records, where):
        run = plan.outcome(records, row.case)
        if row.system == "ddp" and run:
            target, highest = run.final, max(highest, run.losses[len(run.losses) // 6])
        if run:
            style = {"color": COLOURS[row.system], "linewidth": 1.4}
            label = SYSTEMS[row.system].title
            left.plot(run.seconds, run.losses, label=label, **style)
            right.plot([sent / 1e6 for sent in run.sent], run.losses, **style)
    axes = (left, "seconds", 60), (right, "MB sent and received by a worker", 400)
    for panel, words, share in axes:
        panel.axhline(target, color="#444444", linewidth=0.8, linestyle="--")
        panel.set(title=link, xlabel=words, ylabel="nats per character", xscale="log")
        panel.grid(color="#e4e4e4", linewidth=0.8)
        panel.set_xlim(left=panel.get_xlim()[1] / share)
        panel.xaxis.set_minor_formatter(NullFormatter())
        if math.isfinite(highest) and highest > 0:
            panel.set_ylim(top=highest)
