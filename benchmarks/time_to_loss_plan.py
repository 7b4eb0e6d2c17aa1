"""Which runs the time-to-loss benchmark makes, the most important first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ALONE = "alone"
RULES = ("average", "elastic", "agn")
FRACTIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of one worker's steps
FIRST_FRACTION = 0.7
RESERVE = 11  # runs that are left, at least, when other settings are no longer tried


class Setting(NamedTuple):
    """One worker alone, or two with a rule."""

    rule: str = ALONE
    period: int = 0
    moving_rate: float | None = None
    threads: int = 1  # of each worker

    @property
    def workers(self) -> int:
        """How many."""
        return 1 if self.rule == ALONE else 2

    @property
    def what(self) -> str:
        """Name it in a few words."""
        if self.rule == ALONE:
            return "one worker" + ", 2 threads" * (self.threads == 2)
        α = "" if self.moving_rate is None else f", α = {self.moving_rate:g}"
        return f"{self.rule}, τ = {self.period}{α}"


class Job(NamedTuple):
    """One run."""

    setting: Setting
    rate: float  # the learning rate's peak
    fraction: float = 1.0  # of all steps; the schedule is as long
    seed: int = 0

    @property
    def what(self) -> str:
        """Name it in a few words."""
        steps = f", {self.fraction:g} of the steps" if self.fraction < 1 else ""
        return f"{self.setting.what}, rate {self.rate:g}{steps}, seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """The validation loss of a run against its wall time, and what the run took in all."""

    seconds: list[float]
    losses: list[float]
    spent: float

    @property
    def final(self) -> float:
        """The loss at the end; infinite if the run diverged."""
        return self.losses[-1]

    @property
    def wall(self) -> float:
        """Seconds of training."""
        return self.seconds[-1]

    def reached(self, target: float) -> float:
        """Seconds until the loss was first as low as that, between two points in proportion."""
        before = (0.0, math.inf)
        for second, loss in zip(self.seconds, self.losses, strict=True):
            if loss <= target:
                start, above = before
                share = 1.0 if math.isinf(above) else (above - target) / (above - loss)
                return start + share * (second - start)
            before = (second, loss)
        return math.inf


@dataclass(frozen=True)
class Scale:
    """The model and the budget, and what is tried. The first settings are tried in any case."""

    steps: int = 400
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
    first_rate: float = 4e-3
    settings: tuple[Setting, ...] = (
        Setting("average", 10),
        Setting("elastic", 4, 0.45),
        Setting("agn", 4),
        Setting("average", 4),
        Setting("elastic", 10, 0.45),
        Setting("agn", 2),
        Setting("elastic", 4, 0.225),
        Setting("average", 30),
        Setting("agn", 10),
        Setting("elastic", 1, 0.45),
    )
    model: dict[str, int] = field(
        default_factory=lambda: {
            "layers": 4,
            "width": 128,
            "heads": 4,
            "context": 64,
            "batch": 12,
            "part": 9,  # one window in so many of the held-out text is evaluated
        }
    )

    def to_json(self) -> dict[str, Any]:
        """Return what results must agree on to be compared."""
        return {"steps": self.steps, **self.model}


QUICK = Scale(
    steps=40,
    seeds=(0, 1),
    rates=(1e-2,),
    first_rate=1e-2,
    settings=(Setting("average", 4), Setting("elastic", 4, 0.45), Setting("agn", 2)),
    model={"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 12, "part": 90},
)


@dataclass
class Results:
    """All runs so far, and what they tell."""

    scale: Scale
    runs: dict[Job, Result] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds of all runs."""
        return sum(run.spent for run in self.runs.values())

    def cost(self, job: Job) -> float:
        """Guess the seconds of a run, from the longest so far."""
        each = [run.spent / made.fraction for made, run in self.runs.items()]
        return job.fraction * max(each, default=0.0)

    def tried(self, setting: Setting) -> dict[float, Result]:
        """Return the runs of a setting with all steps and the first seed, by rate."""
        seed = self.scale.seeds[0]
        return {
            job.rate: run
            for job, run in self.runs.items()
            if job == Job(setting, job.rate, 1.0, seed)
        }

    def rate(self, setting: Setting) -> float:
        """The best learning rate so far."""
        found = self.tried(setting)
        return min(found, key=lambda rate: (found[rate].final, rate))

    def alone(self, seed: int) -> Result | None:
        """One worker with its best rate."""
        if not self.tried(Setting()):
            return None
        return self.runs.get(Job(Setting(), self.rate(Setting()), 1.0, seed))

    def ratio(self, job: Job) -> float:
        """Time to one worker's final loss, over one worker's time; infinite if not reached."""
        run, alone = self.runs.get(job), self.alone(job.seed)
        if run is None or alone is None:
            return math.inf
        return run.reached(alone.final) / alone.wall

    def fastest(self, setting: Setting, seed: int) -> Job:
        """Return the setting's run, with its best rate, that is first at the target, or nearest."""
        jobs = [Job(setting, self.rate(setting), fraction, seed) for fraction in FRACTIONS]
        made = [job for job in jobs if job in self.runs] or jobs[:1]
        return min(
            made, key=lambda job: (self.ratio(job), self.runs[job].final if job in self.runs else 0)
        )

    def best(self, rule: str) -> Setting | None:
        """Return the rule's setting with the lowest loss after all steps."""
        found = [s for s in self.scale.settings if s.rule == rule and self.tried(s)]
        return min(found, key=lambda s: self.tried(s)[self.rate(s)].final, default=None)

    def recommended(self) -> Setting | None:
        """Return the rules' best setting that is the fastest, or has the lowest loss."""
        found = [setting for rule in RULES if (setting := self.best(rule))]

        def order(setting: Setting) -> tuple[float, float]:
            fastest = self.ratio(self.fastest(setting, self.scale.seeds[0]))
            return fastest, self.tried(setting)[self.rate(setting)].final

        return min(found, key=order, default=None)


def wanted(results: Results, minutes: float) -> Iterator[Job]:
    """Yield the runs that are still to be made; ask again after each, it changes the answer."""
    scale, alone = results.scale, Setting()
    first_of = {setting.rule: setting for setting in reversed(scale.settings)}
    yield from _tune(results, alone, scale.first_rate)
    for rule in RULES:
        yield from _tune(results, first_of[rule], results.rate(alone))
    for setting in scale.settings:
        reserve = RESERVE * results.cost(Job(alone, scale.first_rate))
        if setting not in first_of.values() and results.spent + reserve < 60 * minutes:
            yield from _tune(results, setting, results.rate(first_of[setting.rule]))
    for rule in RULES:
        if best := results.best(rule):
            yield from _shorten(results, best, scale.seeds[0], FIRST_FRACTION)
    if recommended := results.recommended():
        start = results.fastest(recommended, scale.seeds[0]).fraction
        for seed in scale.seeds[1:]:
            yield from _missing(results, Job(alone, results.rate(alone), 1.0, seed))
            yield from _shorten(results, recommended, seed, start)
    both_cores = alone._replace(threads=2)
    yield from _missing(results, Job(both_cores, results.rate(alone), 1.0, scale.seeds[0]))


def _missing(results: Results, job: Job) -> Iterator[Job]:
    if job not in results.runs:
        yield job


def _tune(results: Results, setting: Setting, start: float) -> Iterator[Job]:
    """Climb: until the best rate is better than both its neighbours."""
    rates, seed = results.scale.rates, results.scale.seeds[0]
    yield from _missing(results, Job(setting, start, 1.0, seed))
    best = rates.index(results.rate(setting))
    for neighbour in (best + 1, best - 1):
        if 0 <= neighbour < len(rates):
            yield from _missing(results, Job(setting, rates[neighbour], 1.0, seed))


def _shorten(results: Results, setting: Setting, seed: int, start: float) -> Iterator[Job]:
    """Look for the shortest schedule that still reaches one worker's final loss."""
    rate, at = results.rate(setting), FRACTIONS.index(start)

    def reaches(fraction: float) -> bool:
        return math.isfinite(results.ratio(Job(setting, rate, fraction, seed)))

    # With all steps or never, on the first seed; other seeds walk up to them only if they must.
    if seed == results.scale.seeds[0] and not reaches(1.0):
        return
    yield from _missing(results, Job(setting, rate, start, seed))
    step = 1 if reaches(start) else -1
    while 0 <= at + step < len(FRACTIONS) and reaches(FRACTIONS[at]) == (step == 1):
        at += step
        yield from _missing(results, Job(setting, rate, FRACTIONS[at], seed))


def load(path: Path, scale: Scale) -> Results:
    """Read the runs of an earlier start, or begin the file."""
    results = Results(scale)
    if not path.exists():
        path.write_text(json.dumps(scale.to_json()) + "\n", "utf-8")
        return results
    head, *lines = path.read_text("utf-8").splitlines(keepends=True)
    if json.loads(head) != scale.to_json():
        raise SystemExit(
            f"The runs in {path} are of another model or number of steps: {head.strip()}. "
            "Give `--fresh` to forget them, or another `--out`."
        )
    for line in lines:
        if line.endswith("\n"):  # else it was cut short
            values = json.loads(line)
            setting = Setting(*values["job"].pop("setting"))
            losses = [math.inf if loss is None else loss for loss in values["losses"]]
            run = Result(values["seconds"], losses, values["spent"])
            results.runs[Job(setting, **values["job"])] = run
    return results


def append(path: Path, job: Job, run: Result) -> None:
    """Add a run to the file."""
    losses = [loss if math.isfinite(loss) else None for loss in run.losses]
    values = {"job": job._asdict(), **asdict(run), "losses": losses}
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)  # a line that was cut short
        file.seek(0, 2)
        file.write((json.dumps(values) + "\n").encode())
