"""A straggler and a killed worker, beside the peers: what the others lose, and what the result.

    python benchmarks/peers/with_faults.py --minutes 150    # as root; docs/peers-faults.md and .svg
    python benchmarks/peers/with_faults.py --quick          # a tiny model, without torchft

Two workers on hosts of their own train undisturbed, with one of them four times slower, and with
one that is killed at a third of the way and is back 20 s later. Every run is added to
docs/peers-faults.jsonl: what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import environment
import paths  # noqa: F401 - for what follows
from campaign import Records, Scale, best_setting, case_of, make
from links_network import hosts
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
COMPARED = [name for name, system in SYSTEMS.items() if system.meets != "alone"]
PERIODS = {"whole": (0,), "average": (10,), "diloco": (10,), "elastic": (4,), "async_diloco": (10,)}
FULL = Scale(400, (0, 1, 2), {WORKERS: Model(0.1, Tuned().model)}, PERIODS)
QUICK = Scale(
    40,
    (0,),
    {WORKERS: Model(0.02, QUICK_TUNED.model)},
    {r: (4 * bool(p[0]),) for r, p in PERIODS.items()},
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

    def wanted(self, records: Records) -> Iterator[Case]:
        """Yield the runs that are still to be made, in order."""
        for seed in records.scale.seeds:
            for system in self.systems:
                for fault in FAULTS:
                    case = self.case(system, records.scale, fault, seed)
                    if case not in records.runs:
                        yield case


def main() -> None:
    """Make the runs that there is time for, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=150, help="of all runs together")
    parser.add_argument("--quick", action="store_true", help="a tiny model, without torchft")
    parser.add_argument("--fresh", action="store_true", help="forget the runs made before")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    if why := hosts.missing():
        raise SystemExit(f"There can be no hosts on this machine: {why}.")
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "peers-faults.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    records = Records(path, QUICK if options.quick else FULL)
    systems = [name for name in COMPARED if not options.quick or name != "torchft"]
    plan = Plan(tuned_for(options.quick, WORKERS)[WORKERS], systems)
    python = sys.executable if options.quick else str(environment.python())
    make(plan.wanted, records, options.minutes, python)
    command = "python benchmarks/peers/with_faults.py" + " --quick" * options.quick
    draw(plan, records, options.out / "peers-faults.svg")
    (options.out / "peers-faults.md").write_text(page(plan, records, command), "utf-8")
    print(f"Written: {options.out / 'peers-faults.md'} and the plot beside it")


if __name__ == "__main__":
    main()
