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
TIMED = 60  # steps of DDP, whose losses are those of one process
COMPARED = [name for name, system in SYSTEMS.items() if system.meets != "alone"]
COMPARED.remove("diloco_ray")  # it is for faults

FULL = Scale(
    steps=400,
    seeds=(0, 1, 2),
    models={2: Model(0.05, Tuned().model), 4: Model(0.05, tune.SIZES)},
    periods={
        "average": (10, 50, 4),
        "diloco": (10, 50),
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

    def timed(self, workers: int, link: str, scale: Scale) -> Case:
        """Return the run that times DDP's steps."""
        of_whole = self.reference("whole", workers, scale, scale.seeds[0])
        stop_at = min(TIMED, scale.steps)
        return of_whole._replace(system="ddp", link=link, stop_at=stop_at)

    def candidates(self, system: str, workers: int, link: str, scale: Scale) -> list[Case]:
        """Return a system's runs with all steps, the first seed and each period."""
        tuned, rule = self.tuned[workers], SYSTEMS[system].rule
        found = []
        for period in scale.periods[rule]:
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
                    yield self.timed(workers, link, scale)
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
        yield from candidates
        shortest = math.inf
        for fraction in FRACTIONS:
            for first in candidates:
                case = first._replace(steps=round(fraction * scale.steps))
                if fraction * records.runs[first].wall < shortest:
                    yield case
                    shortest = min(shortest, records.runs[case].reached(target))

    def _repeated(
        self, records: Records, system: str, workers: int, link: str, seed: int
    ) -> Iterator[Case]:
        """Make the quoted runs with another seed."""
        best = self.best(records, system, workers, link)
        if best:
            yield best._replace(seed=seed, steps=records.scale.steps)
            yield best._replace(seed=seed)

    def best(self, records: Records, system: str, workers: int, link: str) -> Case | None:
        """Return the run that was first at DDP's loss; if none was, that with the lowest loss."""
        scale = records.scale
        target = records.runs[self.reference("whole", workers, scale, scale.seeds[0])].final
        made = [
            case
            for case in records.runs
            if (case.system, case.workers, case.link) == (system, workers, link)
            and case.seed == scale.seeds[0]
        ]

        def order(case: Case) -> tuple[float, float]:
            return records.runs[case].reached(target), records.runs[case].final

        return min(made, key=order, default=None)

    def ddp(self, records: Records, workers: int, link: str, seed: int) -> Outcome:
        """Return DDP's run: the losses of one process, at the pace that was timed on the link."""
        scale = records.scale
        whole = records.runs[self.reference("whole", workers, scale, seed)]
        timed = self.timed(workers, link, scale)
        step = records.runs[timed].wall / timed.stop_at
        sent = records.runs[timed].sent[-1] / timed.stop_at
        count = len(whole.losses)
        steps = [min(scale.steps, (k + 1) * (scale.steps // count)) for k in range(count)]
        steps[-1] = scale.steps
        wall = step * scale.steps
        seconds, bytes_sent = [step * n for n in steps], [sent * n for n in steps]
        return Outcome(seconds, bytes_sent, whole.losses, wall, wall, 0.0, 0.0)


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
