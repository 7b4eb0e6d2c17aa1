"""The time to a loss over slow links, beside the peers.

    python benchmarks/peers/over_links.py --minutes 240    # as root; docs/peers-links.md and plots
    python benchmarks/peers/over_links.py --quick          # tiny models, without torchft

Real processes train on hosts of their own, network namespaces, and every run is added to
docs/peers-links.jsonl: what was interrupted goes on. Learning rates are those of
docs/time-to-loss.jsonl and, for four workers, of docs/peers-tuning.jsonl (`tune.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import paths
import tune
from campaign import LINKS, Records, Scale, best_setting, case_of, main
from over_links_page import draw, page
from races import Case, Model, Outcome
from systems import SYSTEMS
from time_to_loss_runs import QUICK as QUICK_TUNED
from time_to_loss_runs import Results, load
from time_to_loss_runs import Scale as Tuned

FRACTIONS = (1.0, 1.5, 2.0)  # of the steps: how long a system may try to reach the loss of DDP
TIMED = 60  # steps at least, of a system whose losses are known, on a link; two periods at least
COMPARED = [name for name, system in SYSTEMS.items() if system.meets != "alone"]
for unused in ("diloco_ray", "average_overlap"):  # they are for faults
    COMPARED.remove(unused)

FULL = Scale(
    steps=400,
    seeds=(0, 1, 2),
    models={2: Model(0.05, Tuned().model), 4: Model(0.05, tune.SIZES)},
    periods={
        "average": (10, 50, 4),
        "diloco": (10, 50),
        "diloco_overlap": (50, 10),
        "elastic": (4, 10),
        "async_diloco": (10, 50),
    },
)
QUICK = Scale(
    steps=40,
    seeds=(0,),
    models={2: Model(0.01, QUICK_TUNED.model)},
    periods=dict.fromkeys(FULL.periods, (4,)),
)


class Plan:
    """Which runs are to be made.

    Args:
        tuned: by the number of workers.
        systems: their names.
    """

    def __init__(self, tuned: Mapping[int, Results], systems: list[str]) -> None:
        self.tuned, self.systems = tuned, systems

    def reference(self, system: str, workers: int, scale: Scale, seed: int) -> Case:
        """Return the run of one process that others are compared with."""
        tuned = self.tuned[workers]
        setting = best_setting(tuned, system, None)
        return case_of(system, setting, tuned.rate(setting), workers, "", scale.steps, seed=seed)

    def ddp_case(self, workers: int, link: str, scale: Scale, seed: int) -> Case:
        """Return DDP's run."""
        return self.reference("whole", workers, scale, seed)._replace(system="ddp", link=link)

    def outcome(self, records: Records, case: Case) -> Outcome | None:
        """Return what came of a run, if that is known.

        Of systems whose workers wait for each other: the losses of any run of the same rule and
        settings, at the pace that was timed on the link.
        """
        if not SYSTEMS[case.system].in_step or not case.link:
            return records.runs.get(case)
        curve = self._same_losses(records, case)
        timed = records.runs.get(self._timed(records.scale, case))
        if curve is None or timed is None:
            return None
        made = self._timed(records.scale, case).stop_at
        count = len(curve.losses)
        steps = [case.steps * (k + 1) / count for k in range(count)]
        seconds = [_along(timed.seconds, made, n) for n in steps]
        sent = [_along(timed.sent, made, n) for n in steps]
        return Outcome(seconds, sent, curve.losses, seconds[-1], seconds[-1], 0.0, 0.0)

    def _timed(self, scale: Scale, case: Case) -> Case:
        """Return the run that times a system's steps on a link."""
        stop_at = min(max(TIMED, 2 * case.period), scale.steps)
        return case._replace(steps=scale.steps, seed=scale.seeds[0], stop_at=stop_at)

    def _same_losses(self, records: Records, case: Case) -> Outcome | None:
        def essence(case: Case) -> tuple[object, ...]:
            return (SYSTEMS[case.system].rule, *case._replace(system="", link=""))

        for other, outcome in records.runs.items():
            if SYSTEMS[other.system].in_step and essence(other) == essence(case):
                return outcome
        return None

    def _missing(self, records: Records, case: Case) -> Iterator[Case]:
        """Yield the runs that are to be made before the outcome of a run is known."""
        if not SYSTEMS[case.system].in_step or not case.link:
            yield case
            return
        if self._same_losses(records, case) is None:
            yield case
        yield self._timed(records.scale, case)

    def candidates(self, system: str, workers: int, link: str, scale: Scale) -> list[Case]:
        """Return a system's runs with all steps, the first seed and each period."""
        tuned, rule = self.tuned[workers], SYSTEMS[system].rule
        found = []
        for period in scale.periods.get(system, scale.periods.get(rule, ())):
            setting = best_setting(tuned, rule, period)
            about = setting, tuned.rate(setting), workers, link, scale.steps
            found.append(case_of(system, *about, seed=scale.seeds[0]))
        return found

    def write(self, records: Records, command: str, out: Path) -> None:
        """Write the page and the plots."""
        draw(self, records, out)
        (out / "peers-links.md").write_text(page(self, records, command), "utf-8")

    def wanted(self, records: Records) -> Iterator[Case]:
        """Yield the runs that are still to be made, in order; ask again after each."""
        for case in self._all(records):
            if case not in records.runs:
                yield case
                return  # it decides what is needed next

    def _all(self, records: Records) -> Iterator[Case]:
        scale = records.scale
        everything = [(workers, link) for workers in self.tuned for link in LINKS]
        for seed in scale.seeds:
            for workers in self.tuned:
                for system in ("alone", "whole"):
                    yield self.reference(system, workers, scale, seed)
            for workers, link in everything:
                if seed == scale.seeds[0]:
                    ddp = self.ddp_case(workers, link, scale, seed)
                    yield from self._missing(records, ddp)
                for system in self.systems[1:]:
                    if seed == scale.seeds[0]:
                        yield from self._ladders(records, system, workers, link)
                    else:
                        yield from self._repeated(records, system, workers, link, seed)

    def _ladders(self, records: Records, system: str, workers: int, link: str) -> Iterator[Case]:
        """More steps for each period, until the loss is that of DDP or it takes too long."""
        scale = records.scale
        target = records.runs[self.reference("whole", workers, scale, scale.seeds[0])].final
        candidates = self.candidates(system, workers, link, scale)
        walls = []
        for case in candidates:
            yield from self._missing(records, case)
            walls.append(self._known(records, case).wall)
        shortest = math.inf
        for fraction in FRACTIONS:
            for first, wall in zip(candidates, walls, strict=True):
                case = first._replace(steps=round(fraction * scale.steps))
                if fraction * wall < shortest:
                    yield from self._missing(records, case)
                    shortest = min(shortest, self._known(records, case).reached(target))

    def _known(self, records: Records, case: Case) -> Outcome:
        outcome = self.outcome(records, case)
        assert outcome is not None, f"not made yet: {case.what}"
        return outcome

    def _repeated(
        self, records: Records, system: str, workers: int, link: str, seed: int
    ) -> Iterator[Case]:
        """Make the quoted runs with another seed."""
        best = self.best(records, system, workers, link)
        if best:
            for steps in {records.scale.steps, best.steps}:
                yield from self._missing(records, best._replace(seed=seed, steps=steps))

    def best(self, records: Records, system: str, workers: int, link: str) -> Case | None:
        """Return the run that was first at DDP's loss; if none was, that with the lowest loss."""
        scale = records.scale
        target = records.runs[self.reference("whole", workers, scale, scale.seeds[0])].final
        if system == "ddp":
            ddp = self.ddp_case(workers, link, scale, scale.seeds[0])
            return ddp if self.outcome(records, ddp) else None
        made = {
            case: outcome
            for first in self.candidates(system, workers, link, scale)
            for fraction in FRACTIONS
            for case in [first._replace(steps=round(fraction * scale.steps))]
            if (outcome := self.outcome(records, case))
        }

        def order(case: Case) -> tuple[float, float]:
            return made[case].reached(target), made[case].final

        return min(made, key=order, default=None)


def _along(values: list[float], last: int, step: float) -> float:
    """Return a figure at a step, of those at even distances up to the last: on a line.

    The line is through the first and the last, so that what is spent once counts once.
    """
    if len(values) == 1:
        return values[0] * step / last
    first = last / len(values)
    return values[0] + (values[-1] - values[0]) * (step - first) / (last - first)


def tuned_for(quick: bool, workers: int | None) -> dict[int, Results]:
    """Read what was tuned before, by the number of workers."""
    if quick:
        return {2: Results(QUICK_TUNED)}
    found = {}
    if workers != 4:
        found[2] = load(paths.ROOT / "docs" / "time-to-loss.jsonl", Tuned())
    if workers != 2:
        found[4] = load(paths.ROOT / "docs" / tune.NAME, tune.SCALE)
        if job := next(tune.wanted(found[4]), None):
            raise SystemExit(f"Run `benchmarks/peers/tune.py` first. It has not made: {job.what}")
    return found


if __name__ == "__main__":
    main(
        "peers-links",
        __doc__,
        240,
        (FULL, QUICK),
        lambda quick, workers: Plan(tuned_for(quick, workers), list(COMPARED)),
    )
