"""What the time-to-loss benchmark says: a sentence, a page and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from pages import facts, markdown
from time_to_loss_plan import tune
from time_to_loss_runs import FRACTIONS, ROUNDS, RULES, Job, Results, Setting

COLOURS = {
    "whole": "#999999",
    "average": "#c8553d",
    "diloco": "#e0a100",
    "elastic": "#1f6fb2",
    "async_diloco": "#8a5fb5",
    "agn": "#2a9d6f",
}
GREY = "#444444"


def summary(results: Results) -> str:
    """Say in a sentence or two what was found."""
    setting, seeds = results.recommended(), _seeds(results)
    if setting is None or not seeds:
        return "There was no time for two workers: give more `--minutes`."
    ratios = [results.ratio(results.fastest(setting, seed)) for seed in seeds]
    rate = results.rate(setting)
    words = ", ".join(_ratio(ratio) for ratio in ratios)
    of = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    return (
        f"Two workers ({setting.what}, learning rate {rate:g}) need this share of one worker's "
        f"time to one worker's final loss: {words} ({of})."
    )


def page(results: Results, command: str, minutes: float) -> str:
    """Return the page for the docs."""
    scale, alone = results.scale, results.alone(results.scale.seeds[0])
    untried = [s.what for s in scale.settings if not results.tried(s)]
    tried = [s for s in scale.settings if results.tried(s)]
    open_ended = [s.what for s in tried if next(tune(results, s, results.rate(s)), None)]
    one = ""
    if alone:
        one = (
            f"One worker, with its best learning rate ({results.rate(Setting()):g}), makes its "
            f"{scale.steps} steps in {alone.wall:.1f} s and ends at {alone.final:.4f} nats per "
            "character. "
        )
    return "\n".join(
        [
            "# Two workers against one: the time to the same loss",
            "",
            f"Made by `{command}`: {len(results.runs)} runs, {results.spent / 60:.0f} minutes. "
            f"{facts()}",
            "",
            f"**{one}{summary(results)}**",
            "",
            "![Validation loss against wall time](time-to-loss.svg)",
            "",
            _READING,
            *_agreement(results),
            *_speeds(results),
            "",
            "## The best setting of each rule",
            "",
            *markdown(
                ("setting", "learning rate", "steps", "seconds", "÷ one worker's time"),
                _best(results),
            ),
            "",
            "## Seeds",
            "",
            *markdown(
                ("seed", "one worker", "two workers", "÷ one worker's time"),
                _by_seed(results),
            ),
            "",
            "## Every setting, with all steps",
            "",
            *markdown(("setting", "losses by learning rate", "lowest"), _settings(results)),
            "",
            *_left("Not tried", untried, minutes),
            *_left("Without a worse learning rate on both sides", open_ended, minutes),
        ]
    )


def _left(what: str, settings: list[str], minutes: float) -> Iterator[str]:
    if settings:
        yield f"{what} in {minutes:g} minutes: {'; '.join(settings)}.\n"


_READING = """\
All train the GPT of `examples/shakespeare.py` with AdamW and a cosine schedule, one thread and one
core per worker; two workers see twice the data in as many steps. One process with twice the batch
and two threads computes what `DistributedDataParallel` would with two workers. DiLoCo's outer rate
and momentum are given as 0.7/0.5; model averaging is 1/0. The loss is that of the center (without
one: of the model) on held-out text. Nothing but training is on the clock: copies are kept and
evaluated afterwards. The learning rate's peak is tuned for every setting, by factors of two, until
the best one is better than both its neighbours. Rules with rounds are tuned in lock-step, all
workers in one process; asynchronous ones by real runs. Then each rule's best setting (the one with
the lowest loss) is timed in real runs, and its schedule shortened as far as it still reaches one
worker's final loss (of the same seed): the time until it does so, in proportion between two
evaluations, over the time of one worker's whole run, is the ratio. Below 1 two workers are faster;
at 0.5 the second core is used as well as the first."""


def _agreement(results: Results) -> Iterator[str]:
    """Compare lock-step with real runs."""
    seed, both = results.scale.seeds[0], []
    for setting in (s for s in results.scale.settings if s.rule in ROUNDS):
        rate = results.rate(setting)
        real, tried = results.runs.get(Job(setting, rate, 1.0, seed)), results.tried(setting)
        if real and tried:
            both.append(f"{setting.what}: {_loss(tried[rate].final)} and {_loss(real.final)}")
    if both:
        yield f"Final losses in lock-step and of a real run: {'; '.join(both)}."


def _speeds(results: Results) -> Iterator[str]:
    """Say how much the machine itself varied."""
    steps = results.scale.steps
    alone = [steps * j.fraction / r.wall for j, r in results.runs.items() if j.setting == Setting()]
    if len(alone) > 1:
        yield (
            f"The machine is shared: one worker alone, which always computes the same, made "
            f"{min(alone):.1f} to {max(alone):.1f} steps/s in its {len(alone)} runs. A ratio "
            "is uncertain by about as much; losses are not."
        )


def _timed(results: Results) -> list[Job]:
    """Return the fastest run of each rule's best setting."""
    best = [setting for rule in RULES if (setting := results.best(rule))]
    jobs = [results.fastest(setting, results.scale.seeds[0]) for setting in best]
    return [job for job in jobs if job in results.runs]


def _best(results: Results) -> Iterator[list[str]]:
    for job in _timed(results):
        seconds = f"{results.runs[job].wall:.1f}"
        steps, ratio = _steps(results, job), _of(results, job)
        yield [job.setting.what, f"{job.rate:g}", steps, seconds, ratio]


def _by_seed(results: Results) -> Iterator[list[str]]:
    setting = results.recommended()
    for seed in _seeds(results):
        alone = results.alone(seed)
        if setting and alone:
            job = results.fastest(setting, seed)
            run, steps = results.runs[job], _steps(results, job)
            one = f"{_loss(alone.final)} after {alone.wall:.1f} s"
            two = f"{setting.what}, {steps} steps: {_loss(run.final)} after {run.wall:.1f} s"
            yield [str(seed), one, two, _of(results, job)]


def _settings(results: Results) -> Iterator[list[str]]:
    for setting in (Setting(), *results.scale.settings):
        if tried := results.tried(setting):
            losses = ", ".join(f"{rate:g}: {_loss(tried[rate].final)}" for rate in sorted(tried))
            yield [setting.what, losses, _loss(tried[results.rate(setting)].final)]


def _seeds(results: Results) -> list[int]:
    """Seeds with which both one worker and the recommended setting have run."""
    setting = results.recommended()
    return [
        seed
        for seed in results.scale.seeds
        if setting and results.alone(seed) and results.fastest(setting, seed) in results.runs
    ]


def _steps(results: Results, job: Job) -> str:
    return str(max(1, round(job.fraction * results.scale.steps)))


def _of(results: Results, job: Job) -> str:
    return _ratio(results.ratio(job))


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if math.isfinite(ratio) else "not reached"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def draw(results: Results, path: Path) -> None:
    """Draw the loss of one worker and of each rule's best setting against wall time."""
    seed = results.scale.seeds[0]
    alone = results.alone(seed)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 4.4), dpi=150, layout="constrained")
        panel = figure.subplots()
        lines = [(f"{j.setting.what} ({_steps(results, j)} steps)", j) for j in _timed(results)]
        highest = 0.0
        if alone:
            one = Job(Setting(), results.rate(Setting()), FRACTIONS[0], seed)
            lines.insert(0, (f"one worker ({results.scale.steps} steps)", one))
            panel.axhline(alone.final, color=GREY, linewidth=0.8, linestyle="--")
            highest = alone.losses[len(alone.losses) // 6]
            panel.annotate(
                f"one worker's final loss, {alone.final:.3f}",
                (0, alone.final),
                (2, -10),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                fontsize=7.5,
                color=GREY,
            )
        for label, job in lines:
            run, colour = results.runs[job], COLOURS.get(job.setting.rule, GREY)
            panel.plot(run.seconds, run.losses, marker=".", color=colour, label=label)
            if alone and math.isfinite(at := run.reached(alone.final)):
                panel.plot([at], [alone.final], marker="o", color=colour, markersize=7)
        if math.isfinite(highest) and highest > 0:
            panel.set_ylim(top=highest)  # the beginning is the same for all
        panel.set_xlabel("seconds of training")
        panel.set_ylabel("validation loss, nats per character")
        panel.grid(color="#e4e4e4", linewidth=0.8)
        if lines:
            panel.legend(frameon=False)
        figure.savefig(path)
