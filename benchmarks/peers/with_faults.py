"""A straggler and a killed worker, beside the peers: what the others lose, and what the result.

    python benchmarks/peers/with_faults.py --minutes 180    # as root; docs/peers-faults.md and .svg
    python benchmarks/peers/with_faults.py --quick          # a tiny model, without torchft

Two workers on hosts of their own train undisturbed, with one of them four times slower, and with
one that is killed at a third of the way and is back 20 s later. Every run is added to
docs/peers-faults.jsonl: what was interrupted goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import paths  # noqa: F401 - for what follows
from campaign import Records, Scale, best_setting, case_of, main
from over_links import tuned_for
from races import KILLED, STRAGGLER, Case, Model
from systems import SYSTEMS
from time_to_loss_runs import QUICK as QUICK_TUNED
from time_to_loss_runs import Results
from time_to_loss_runs import Scale as Tuned
from with_faults_page import draw, page

LINK = "1 Gbit/s, 1 ms"
WORKERS = 2
FAULTS = ("", STRAGGLER, KILLED)
COMPARED = ["ddp", "postlocal", "torchft", "diloco_overlap"]
COMPARED += ["async_diloco", "diloco_ray", "elastic", "average_overlap"]
PERIODS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("average", "diloco", "async_diloco"), (10,)),
    "whole": (0,),
    "elastic": (4,),
}
FULL = Scale(400, (0, 1, 2), {WORKERS: Model(0.15, Tuned().model)}, PERIODS)
QUICK = Scale(
    40,
    (0,),
    {WORKERS: Model(0.02, QUICK_TUNED.model)},
    PERIODS | dict.fromkeys(PERIODS.keys() - {"whole"}, (4,)),
)


class Plan:
    """Which runs are to be made: all systems undisturbed and with each fault, seed by seed."""

    def __init__(self, tuned: Results, systems: list[str]) -> None:
        self.tuned, self.systems = tuned, systems

    def case(self, system: str, scale: Scale, fault: str, seed: int) -> Case:
        """Return a system's run."""
        rule = SYSTEMS[system].rule
        setting = best_setting(self.tuned, rule, scale.periods[rule][0])
        about = setting, self.tuned.rate(setting), WORKERS, LINK, scale.steps
        return case_of(system, *about, seed=seed, fault=fault)

    def write(self, records: Records, command: str, out: Path) -> None:
        """Write the page and the plot."""
        draw(self, records, out / "peers-faults.svg")
        (out / "peers-faults.md").write_text(page(self, records, command), "utf-8")

    def wanted(self, records: Records) -> Iterator[Case]:
        """Yield the runs that are still to be made, in order."""
        for seed in records.scale.seeds:
            for system in self.systems:
                for fault in FAULTS:
                    case = self.case(system, records.scale, fault, seed)
                    if case not in records.runs:
                        yield case


if __name__ == "__main__":
    main(
        "peers-faults",
        __doc__,
        180,
        (FULL, QUICK),
        lambda quick, _: Plan(tuned_for(quick, WORKERS)[WORKERS], list(COMPARED)),
    )
