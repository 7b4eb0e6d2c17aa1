"""Faults of a center on Ray, on three hosts: how long the others wait, and what is lost.

    python benchmarks/ray_faults.py                     # ten minutes; writes docs/faults.md
    python benchmarks/ray_faults.py --only shard/agn    # some of them; the page keeps the others

The hosts are namespaces on this machine, so this needs Linux and root. The faults are those of
`tests/faults/ray_drill.py`, which checks that each run ends right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pages import facts, markdown
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

DRILL = Path(__file__).parents[1] / "tests" / "faults" / "ray_drill.py"
COLUMNS = ("what happens", "rule", "usually, s", "longest wait, s", "lost")
RULES = {"agn": "AGN", "elastic": "elastic", "average": "averaging"}


@dataclass(frozen=True)
class Row:
    """How a run with a fault has gone.

    Args:
        case: the name of the run.
        fault: what happened.
        rule: of the run.
        usual: seconds between two exchanges of a worker before the fault.
        gap: the longest since, of the workers that lived.
        lost: what is not in the center.
        error: why the run did not end right.
    """

    case: str
    fault: str = ""
    rule: str = ""
    usual: float = 0.0
    gap: float = 0.0
    lost: str = ""
    error: str = ""

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        if self.error:
            return [self.case, "", "", "", f"**did not end right**: {self.error}"]
        return [
            self.fault,
            RULES[self.rule],
            f"{self.usual:.2f}",
            f"{self.gap:.1f}" if self.gap >= 1 else f"{self.gap:.2f}",
            self.lost,
        ]


def drill(*words: str) -> Iterator[str]:
    """Yield what the drill prints, line by line."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DRILL), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        if process.stdout:
            yield from process.stdout
    if process.returncode:
        raise SystemExit(f"The drill ended with status {process.returncode}.")


def page(rows: Sequence[Row], before: str = "") -> str:
    """Return the page; what is not among the rows is as it was before."""
    lines = [line for line in before.splitlines() if line.startswith("| ")][2:]
    cells = {tuple(c[:2]): c for c in (line.strip("| ").split(" | ") for line in lines)}
    cells |= {tuple(c[:2]): c for c in (row.cells() for row in rows)}
    return "\n".join(
        [
            "# Faults on a Ray cluster, measured",
            "",
            f"Made by `python benchmarks/ray_faults.py`. {facts('ray')}",
            "",
            *markdown(COLUMNS, cells.values()),
            "",
            _READING,
        ]
    )


_READING = """\
Each run has two or three worker processes on three hosts, network namespaces with a Ray node
each. The model has 4 MB in two or four shards; a step takes 50 ms, and every step exchanges. All
share two cores. Shards write a checkpoint every 20 exchanges or 5 seconds (the default is 100 or
10). Every run has to end with all workers at their last step and a center that can be accounted
for: under AGN it is a sum of whole numbers, which counts the exchanges of every worker in every
shard; under elastic averaging workers and center together have what was added to them.

*Longest wait* is between two exchanges of a worker that lived through the fault; *usually* is the
median before it. *Lost* counts an exchange once per shard that has lost it.

- **A worker killed.** The others do not notice. Its successor gets the rank once the dead one has
  been silent for 10 seconds (at once, if `springline run` has seen it end), and takes the center.
  An exchange that was under way may have reached some shards and not others.
- **A shard killed.** Ray restarts it within seconds, from its last checkpoint. Workers retry.
  Under averaging they send their contribution to the open round again; one that already has the
  round's mean and has gone on is waited for 10 seconds, and then left out of that part of the
  center, once.
- **The head killed.** Asynchronous rules need it for membership only; rounds wait for it.
- **A machine.** The wait is Ray's: its head asks every node `RAY_health_check_period_ms` = 3,000
  after its last answer, waits `RAY_health_check_timeout_ms` = 10,000, and gives up after
  `RAY_health_check_failure_threshold` = 5 in a row. *Ray looks sooner* is with 1,000 for both,
  set in the environment of `ray start --head`.
- **A link down.** The wait is longer than the cut, since TCP retries in intervals that double. A
  machine that is away for longer than Ray waits is declared dead, and its node ends when it is
  back; its worker starts on another machine.
- **A worker stopped.** A round of averaging waits for it for 10 seconds and goes on without it.
- **Everything.** The wait is mostly the start of three Ray nodes and of the workers.
"""


def main() -> None:
    """Run the faults, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="some faults only")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the page goes")
    options = parser.parse_args()
    cases = options.only or [line.strip() for line in drill("--list")]
    console, rows = Console(), list[Row]()
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console) as progress:
        task = progress.add_task("three hosts start", total=len(cases))
        for line in drill(*cases):
            rows.append(Row(**json.loads(line)))
            progress.print(" | ".join(rows[-1].cells()))
            after = cases[len(rows)] if len(rows) < len(cases) else "done"
            progress.update(task, description=after, advance=1)
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "faults.md"
    before = written.read_text("utf-8") if options.only and written.exists() else ""
    written.write_text(page(rows, before), "utf-8")
    console.print(f"Written: {written}")
    raise SystemExit(any(row.error for row in rows))


if __name__ == "__main__":
    main()
