"""Runs that are written down one by one, so that what was interrupted goes on where it was."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import environment
from links_network import Link
from links_network import hosts as machines
from pages import facts
from races import Case, Field, Model, Outcome, hosts_behind, run
from systems import SYSTEMS
from time_to_loss_runs import Results, Setting

LINKS = {
    "100 Mbit/s, 20 ms": Link(mbits=100, delay=0.02),
    "1 Gbit/s, 1 ms": Link(mbits=1000, delay=0.001),
}


PlanOf = Callable[[bool, "int | None"], "Plan"]  # quick, and how many workers


@dataclass(frozen=True)
class Scale:
    """What is trained, for how long, and how often."""

    steps: int
    seeds: tuple[int, ...]
    models: dict[int, Model]  # by the number of workers
    periods: dict[str, tuple[int, ...]]  # that a rule is tried with

    def to_json(self) -> dict[str, Any]:
        """Return what runs must agree on to be compared."""
        models = {str(workers): asdict(model) for workers, model in self.models.items()}
        return {"steps": self.steps, "models": models}


@dataclass
class Records:
    """All runs so far, and where they are written."""

    path: Path
    scale: Scale
    runs: dict[Case, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = json.dumps(self.scale.to_json())
        if not self.path.exists():
            self.path.write_text(head + "\n", "utf-8")
        first, *lines = self.path.read_text("utf-8").splitlines(keepends=True)
        if first.strip() != head:
            raise SystemExit(
                f"The runs in {self.path} are of other models or another number of steps. "
                "Give `--fresh` to forget them, or another `--out`."
            )
        whole = [line for line in lines if line.endswith("\n")]  # one may have been cut short
        self.path.write_text("".join([first, *whole]), "utf-8")
        for line in whole:
            values = json.loads(line)
            given = values["case"]
            case = Case(**{**given, "outer": given["outer"] and tuple(given["outer"])})
            losses = [math.inf if loss is None else loss for loss in values["losses"]]
            self.runs[case] = Outcome(**{**values["outcome"], "losses": losses})

    @property
    def spent(self) -> float:
        """Minutes of all runs."""
        return sum(outcome.spent for outcome in self.runs.values()) / 60

    def seeds(self) -> str:
        """Name the seeds of the runs."""
        found = sorted({case.seed for case in self.runs})
        return f"seed {found[0]}" if len(found) == 1 else f"seeds {', '.join(map(str, found))}"

    def facts(self) -> str:
        """Say what was measured with, and how busy the machine was."""
        loads = sorted(outcome.load for outcome in self.runs.values())
        busy = f" The load was {loads[0]:.1f} to {loads[-1]:.1f}." if loads else ""
        return f"{len(loads)} runs, {self.spent:.0f} minutes. {facts()}{busy}"

    def add(self, case: Case, outcome: Outcome) -> None:
        """Add a run, to the file too."""
        self.runs[case] = outcome
        values = asdict(outcome)
        losses = [loss if math.isfinite(loss) else None for loss in values.pop("losses")]
        line = {"case": case._asdict(), "losses": losses, "outcome": values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def case_of(
    system: str, setting: Setting, rate: float, workers: int, link: str, steps: int, **more: Any
) -> Case:
    """Return a run of a system with a rule's setting."""
    of_rule = setting.period, setting.outer, setting.moving_rate
    return Case(system, *of_rule, rate, workers, link, steps, **more)


def best_setting(tuned: Results, rule: str, period: int | None) -> Setting:
    """Return the setting of a rule, with this period, that had the lowest loss."""
    settings = (Setting(), *tuned.scale.settings)
    found = [s for s in settings if s.rule == rule and s.period == (period or 0)]

    def lowest(setting: Setting) -> float:
        return min((run.final for run in tuned.tried(setting).values()), default=math.inf)

    return min(found, key=lowest)


class _Hosts:
    """The hosts of the last run, kept for the next one if it needs the same."""

    def __init__(self, python: str) -> None:
        self._python, self._held = python, ExitStack()
        self._key: tuple[Link | None, int, bool] | None = None
        self._hosts: Field | None = None

    def __enter__(self) -> _Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def of(self, case: Case) -> Field:
        """Return hosts for a run."""
        meets = SYSTEMS[case.system].meets
        link = None if meets == "alone" else LINKS[case.link]
        key = (link, case.workers, meets == "ray")
        if key != self._key or self._hosts is None:
            self._held.close()
            self._key, self._held = None, ExitStack()
            self._hosts = self._held.enter_context(hosts_behind(*key, self._python))
            self._key = key
        return self._hosts


def make(
    wanted: Callable[[Records], Iterator[Case]], records: Records, minutes: float, python: str
) -> None:
    """Make the runs that are wanted and that there is time for."""
    with _Hosts(python) as hosts:
        while (case := next(wanted(records), None)) is not None:
            if records.spent >= minutes:
                print(f"{records.spent:.0f} minutes are over; next would be: {case.what}")
                return
            number = len(records.runs) + 1
            print(f"{time.strftime('%H:%M:%S')} run {number}: {case.what} ...", flush=True)
            outcome = run(hosts.of(case), case, records.scale.models[case.workers])
            records.add(case, outcome)
            print(f"    {outcome.final:.4f} after {outcome.wall:.1f} s", flush=True)


class Plan(Protocol):
    """Which runs are to be made, and what they say."""

    systems: list[str]

    def wanted(self, records: Records) -> Iterator[Case]:
        """Yield the runs that are still to be made."""

    def write(self, records: Records, command: str, out: Path) -> None:
        """Write the page and the plots."""


def main(
    name: str, about: str | None, minutes: float, scales: tuple[Scale, Scale], plan_of: PlanOf
) -> None:
    """Do what a script's arguments ask for: make the runs, write the page and the plots."""
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=minutes, help="of all runs together")
    parser.add_argument("--quick", action="store_true", help="tiny models, without torchft")
    parser.add_argument("--fresh", action="store_true", help="forget the runs made before")
    parser.add_argument("--workers", type=int, choices=(2, 4), help="only so many; default: all")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plots go")
    options = parser.parse_args()
    if why := machines.missing():
        raise SystemExit(f"There can be no hosts on this machine: {why}.")
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    full, quick = scales
    records = Records(path, quick if options.quick else full)
    plan = plan_of(options.quick, options.workers)
    python = sys.executable if options.quick else str(environment.python())
    if options.quick:
        plan.systems.remove("torchft")
    make(plan.wanted, records, options.minutes, python)
    script = Path(sys.argv[0]).name
    plan.write(
        records, f"python benchmarks/peers/{script}{' --quick' * options.quick}", options.out
    )
    print(f"Written: {options.out / name}.md and what belongs to it")
