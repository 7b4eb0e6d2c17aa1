"""The runs of the time-to-loss benchmark: what each of them is, and what all of them tell."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ALONE, WHOLE = "alone", "whole"
ROUNDS = ("average", "diloco")
RULES = (WHOLE, *ROUNDS, "elastic", "async_diloco", "agn")
FRACTIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of one worker's steps


class Setting(NamedTuple):
    """One worker alone, one process with the data of all, or workers with a rule."""

    rule: str = ALONE
    period: int = 0
    moving_rate: float | None = None
    outer: tuple[float, float] | None = None  # rate and momentum
    all: int = 2  # workers that share the data, unless one is alone

    @property
    def workers(self) -> int:
        """How many processes there are in a real run."""
        return 1 if self.rule in (ALONE, WHOLE) else self.all

    @property
    def threads(self) -> int:
        """Of each worker."""
        return 2 if self.rule == WHOLE else 1

    @property
    def what(self) -> str:
        """Name it in a few words."""
        if self.rule == ALONE:
            return "one worker"
        if self.rule == WHOLE:
            return f"one process, {'twice' if self.all == 2 else f'{self.all} times'} the batch"
        α = "" if self.moving_rate is None else f", α = {self.moving_rate:g}"
        outer = "" if self.outer is None else f", outer {self.outer[0]:g}/{self.outer[1]:g}"
        return f"{self.rule.replace('_', ' ')}, τ = {self.period}{α}{outer}"


class Job(NamedTuple):
    """One run."""

    setting: Setting
    rate: float  # the learning rate's peak
    fraction: float = 1.0  # of all steps; the schedule is as long
    seed: int = 0
    tuning: bool = False  # then only its losses count, not its time

    @property
    def one_process(self) -> bool:
        """Whether all its steps are made in one process, on one core."""
        return self.tuning and self.setting.rule in (ALONE, WHOLE, *ROUNDS)

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
        Setting(WHOLE),
        Setting("average", 10),
        Setting("diloco", 10, None, (0.7, 0.5)),
        Setting("elastic", 4, 0.45),
        Setting("async_diloco", 10, None, (0.7, 0.5)),
        Setting("agn", 4),
        Setting("average", 50),
        Setting("diloco", 50, None, (1.0, 0.5)),
        Setting("diloco", 10, None, (1.0, 0.5)),
        Setting("diloco", 50, None, (0.7, 0.5)),
        Setting("diloco", 10, None, (0.7, 0.9)),
        Setting("diloco", 50, None, (0.7, 0.9)),
        Setting("elastic", 1, 0.45),
        Setting("elastic", 10, 0.45),
        Setting("async_diloco", 50, None, (1.0, 0.5)),
        Setting("elastic", 50, 0.45),
        Setting("agn", 10),
        Setting("average", 4),
        Setting("agn", 2),
        Setting("elastic", 4, 0.225),
        Setting("average", 30),
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
    settings=(
        Setting(WHOLE),
        Setting("average", 4),
        Setting("diloco", 4, None, (0.7, 0.5)),
        Setting("elastic", 4, 0.45),
        Setting("async_diloco", 4, None, (0.7, 0.5)),
        Setting("agn", 2),
    ),
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
        """Return the runs that tuned a setting, by rate: all steps, the first seed."""
        seed = self.scale.seeds[0]
        return {
            job.rate: run
            for job, run in self.runs.items()
            if job == Job(setting, job.rate, 1.0, seed, tuning=True)
        }

    def rate(self, setting: Setting) -> float:
        """The best learning rate so far."""
        found = self.tried(setting)
        first = self.scale.first_rate
        return min(found, key=lambda rate: (found[rate].final, rate), default=first)

    def alone(self, seed: int) -> Result | None:
        """One worker with its best rate."""
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
        """Return the best setting of two workers: the fastest, or that with the lowest loss."""
        found = [setting for rule in RULES if rule != WHOLE and (setting := self.best(rule))]

        def order(setting: Setting) -> tuple[float, float]:
            fastest = self.ratio(self.fastest(setting, self.scale.seeds[0]))
            return fastest, self.tried(setting)[self.rate(setting)].final

        return min(found, key=order, default=None)


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
            rule, period, moving_rate, outer, *more = values["job"].pop("setting")
            setting = Setting(rule, period, moving_rate, outer and tuple(outer), *more)
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
