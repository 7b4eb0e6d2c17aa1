"""What the benchmark of the period says: a page and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from pages import facts, markdown
from period_plan import (
    AVERAGE,
    DELAYED,
    DILOCO,
    ELASTIC,
    PUSHES,
    RULES,
    WHOLE,
    Family,
    Results,
)

TOLERANCE = 0.03  # nats; two seeds differ by less
NAMES = {
    AVERAGE: "model averaging",
    DILOCO: "DiLoCo",
    ELASTIC: "elastic averaging",
    DELAYED: "asynchronous DiLoCo",
    PUSHES: "asynchronous DiLoCo, Nesterov in every push",
}
COLOURS = {
    AVERAGE: "#c8553d",
    DILOCO: "#e0a100",
    ELASTIC: "#1f6fb2",
    DELAYED: "#8a5fb5",
    PUSHES: "#2a9d6f",
}
GREY = "#777777"


def page(results: Results) -> str:
    """Return the page for the docs."""
    shape, scale = results.scale.model, results.scale
    return "\n".join(
        [
            "# How long may the period be?",
            "",
            f"Made by `python benchmarks/period.py`: {len(results.losses)} runs of {scale.steps} "
            f"steps per worker. {facts()}",
            "",
            "The longest period, of those tried, at which a rule's center ends within "
            f"{TOLERANCE:g} nats of its own best, and the longest at which it is better than one "
            "worker alone, which ends at "
            f"{_loss(results.loss(Family(1, WHOLE), 0))}:",
            "",
            *markdown(
                (
                    "workers",
                    "rule",
                    "best",
                    f"within {TOLERANCE:g} of it up to τ =",
                    "there: loss, outer, learning rate",
                    "better than one worker up to τ =",
                ),
                _answers(results),
            ),
            "",
            "![Loss against the period](period.svg)",
            "",
            f"The model is the GPT of `examples/shakespeare.py` (layers: {shape['layers']}, width: "
            f"{shape['width']}, context: {shape['context']}, batch of each worker: "
            f"{shape['batch']}) with AdamW and a cosine schedule. {_READING}",
            "",
            *_tables(results),
            "## The outer rate and momentum that held",
            "",
            "DiLoCo's best pair, and how much worse the others ended:",
            "",
            *markdown(("workers", "τ", "best", "others"), _pairs(results)),
            "",
            *_agreement(results),
            *_seeds(results),
            "## Learning rates",
            "",
            *markdown(("workers", "rule", "τ", "losses by learning rate"), _rates(results)),
            "",
        ]
    )


_READING = """\
The loss is that of the center, in nats per character of held-out text. Workers are springline's
own and make their steps in lock-step, in one process: after each step those whose period is over
exchange, asynchronous ones one after another. Outer rate and momentum are given as 0.7/0.5; model
averaging is 1/0. Asynchronous DiLoCo has delayed Nesterov momentum over as many pushes as there are
workers; with Nesterov in every push the rate is divided by the workers instead. Elastic averaging
has its default α, 0.9/workers. The learning rate's peak is tuned by factors of two at τ = 5 and 50,
for every rule and outer pair: with two workers until the best one is better than both its
neighbours; with more from there upwards in rounds, and both ways under elastic averaging; for
asynchronous DiLoCo from DiLoCo's downwards. The last table has those that there was time for. Other
periods take that of the nearer one, and Nesterov in every push that of delayed Nesterov. One
process with the whole batch computes what `DistributedDataParallel` would. An empty cell was not
run: there was no time for it."""


def _periods(results: Results, workers: int) -> list[int]:
    of = {run.period for run in results.losses if run.family.workers == workers and run.period}
    return sorted(of)


def _best(results: Results, workers: int, rule: str) -> dict[int, tuple[Family, float]]:
    """Return the rule's best family and its loss, by period."""
    found = {}
    for period in _periods(results, workers):
        if family := results.best(workers, rule, period):
            found[period] = family, results.loss(family, period)
    return found


def _answers(results: Results) -> Iterator[list[str]]:
    alone = results.loss(Family(1, WHOLE), 0)
    for workers in results.scale.workers:
        for rule in RULES:
            if not (curve := _best(results, workers, rule)):
                continue
            lowest = min(loss for _, loss in curve.values())
            within = max(τ for τ, (_, loss) in curve.items() if loss <= lowest + TOLERANCE)
            family, loss = curve[within]
            better = [τ for τ, (_, loss) in curve.items() if loss < alone]
            rate = results.rate(family, within)
            there = f"{_loss(loss)}{_outer(family)}, {rate:g}"
            longest = str(max(better)) if better else "none"
            yield [str(workers), NAMES[rule], _loss(lowest), str(within), there, longest]


def _tables(results: Results) -> Iterator[str]:
    for workers in results.scale.workers:
        periods = _periods(results, workers)
        families = [f for f in _families(results) if f.workers == workers and f.rule != WHOLE]
        if families:
            whole = _loss(results.loss(Family(workers, WHOLE), 0))
            yield f"## {workers} workers"
            yield ""
            yield f"One process with the whole batch ends at {whole}."
            yield ""
            rows = ([_name(f), *(_loss(results.loss(f, τ)) for τ in periods)] for f in families)
            yield from markdown(("", *(f"τ = {τ}" for τ in periods)), rows)
            yield ""


def _pairs(results: Results) -> Iterator[list[str]]:
    for workers in results.scale.workers:
        for period in _periods(results, workers):
            pairs = [f for f in _families(results) if f[:2] == (workers, DILOCO)]
            pairs.append(Family(workers, AVERAGE))
            losses = {f: results.loss(f, period) for f in pairs}
            ranked = sorted((loss, _pair(f)) for f, loss in losses.items() if not math.isnan(loss))
            if len(ranked) > 1:
                lowest, best = ranked[0]
                others = (f"{pair}: +{loss - lowest:.3f}" for loss, pair in ranked[1:])
                yield [str(workers), str(period), best, ", ".join(others)]


def _agreement(results: Results) -> Iterator[str]:
    """Compare lock-step with real runs."""
    pairs = [(run, loss) for run, loss in results.losses.items() if run.real]
    if pairs:
        yield "## Is lock-step fair?"
        yield ""
        yield (
            "The same run in lock-step and by `springline run`, each worker a process. In rounds "
            "they are equal. Without, the order in which workers exchange differs: "
            "in lock-step they take turns, always; real processes do not. That this is the cause "
            "of the differences was not shown."
        )
        yield ""
        rows = (
            [
                _name(run.family),
                str(run.period),
                f"{run.rate:g}",
                _loss(results.losses.get(run._replace(real=False), math.nan)),
                _loss(loss),
            ]
            for run, loss in pairs
        )
        yield from markdown(("2 workers", "τ", "learning rate", "lock-step", "real"), rows)
        yield ""


def _seeds(results: Results) -> Iterator[str]:
    """Give what was run with several seeds."""
    first, *others = results.scale.seeds
    again = [run for run in results.losses if run.seed in others and not run.real]
    if again:
        yield "## Seeds"
        yield ""
        yield f"The best of each rule once more; all other tables are of seed {first}."
        yield ""
        rows = (
            [
                str(run.family.workers),
                _name(run.family),
                str(run.period or ""),
                _loss(results.losses.get(run._replace(seed=first), math.nan)),
                _loss(results.losses[run]),
            ]
            for run in sorted(again, key=lambda run: (run.family.workers, run.period))
        )
        yield from markdown(("workers", "rule", "τ", f"seed {first}", "another"), rows)
        yield ""


def _rates(results: Results) -> Iterator[list[str]]:
    for family in _families(results):
        for period in (0,) if family.rule == WHOLE else results.scale.anchors:
            tried = results.tried(family, period)
            if len(tried) > 1:
                losses = ", ".join(f"{rate:g}: {_loss(tried[rate])}" for rate in sorted(tried))
                yield [str(family.workers), _name(family), str(period or ""), losses]


def _families(results: Results) -> list[Family]:
    """Return those that were run, by number of workers and as rules are listed."""
    order = (WHOLE, *RULES)
    found = {run.family for run in results.losses}
    return sorted(found, key=lambda f: (f.workers, order.index(f.rule), f.outer or (0, 0)))


def _name(family: Family) -> str:
    if family.rule == WHOLE:
        return "one worker" if family.workers == 1 else "one process, the whole batch"
    return NAMES[family.rule] + _outer(family)


def _outer(family: Family) -> str:
    return f", {_pair(family)}" if family.outer else ""


def _pair(family: Family) -> str:
    rate, momentum = family.outer or (1.0, 0.0)
    return f"{rate:g}/{momentum:g}"


def _loss(loss: float) -> str:
    if math.isnan(loss):
        return ""
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


def draw(results: Results, path: Path) -> None:
    """Draw the loss of each rule's best outer pair against the period, by number of workers."""
    numbers = [p for p in results.scale.workers if _periods(results, p)]
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "period"}):
        figure = Figure(figsize=(8.6, 3.8), layout="constrained")
        panels = figure.subplots(1, max(1, len(numbers)), sharey=True, squeeze=False)[0]
        alone = results.loss(Family(1, WHOLE), 0)
        for panel, workers in zip(panels, numbers, strict=False):
            panel.spines[["top", "right"]].set_visible(False)
            for rule in RULES:
                curve = _best(results, workers, rule)
                losses = [loss for _, loss in curve.values()]
                panel.plot(list(curve), losses, marker=".", color=COLOURS[rule], label=NAMES[rule])
            whole = results.loss(Family(workers, WHOLE), 0)
            panel.axhline(whole, color=GREY, label="one process, the whole batch")
            panel.axhline(alone, color=GREY, linestyle=":", label="one worker")
            periods = _periods(results, workers)
            panel.set_xscale("log")
            panel.set_xticks(periods, [str(period) for period in periods])
            panel.minorticks_off()
            panel.set_title(f"{workers} workers", fontsize=9.5)
            panel.set_xlabel("τ, steps between two exchanges")
            panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        panels[0].set_ylabel("loss, nats per character")
        if handles := panels[0].get_legend_handles_labels()[0]:
            figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None})
