"""Faults of a center on Ray, on three hosts: how long the others wait, and what is lost.

    python benchmarks/ray_faults.py                     # ten minutes; into docs/many-machines.md
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
HEADING = "## Faults, measured"
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


def section(rows: Sequence[Row], before: str = "") -> str:
    """Return the section for the docs; what is not among the rows is as it was before."""
    lines = [line for line in before.splitlines() if line.startswith("| ")][2:]
    cells = {tuple(c[:2]): c for c in (line.strip("| ").split(" | ") for line in lines)}
    cells |= {tuple(c[:2]): c for c in (row.cells() for row in rows)}
    return "\n".join(
        [
            HEADING,
            "",
            f"Made by `python benchmarks/ray_faults.py`. {facts('ray')}",
            "",
            *markdown(COLUMNS, cells.values()),
            "",
            _READING,
        ]
    )


_READING = """\
Every run is of two or three worker processes on three hosts, network namespaces with a Ray node
each, with a model of 4 MB in two or four shards, a step of 50 ms and an exchange after every step.
All share two cores. Shards write a checkpoint every 20 exchanges or 5 seconds
(`every=(20, 5.0)`; the default is `(100, 10.0)`); all else is as by default. Every run has to end
with all workers at their last step and a center that can be accounted for: under AGN it is a sum of
whole numbers, which counts the exchanges of every worker in every shard; under elastic averaging
workers and center have together what was added to them.

*Longest wait* is between two exchanges of a worker that lived through it, from the fault to the end
of the run; *usually* is the median before. *Lost* counts exchanges once per shard that has lost
them: an exchange has a part in every shard.

- **A worker killed.** The others do not notice. The one that is started in its place with the same
  rank gets its seat when the dead one has been silent for `grace`, 10 seconds (at once, if
  `springline run` has seen it end), takes the center and goes on at the step that the shards know.
  An exchange that was under way may have reached some shards and not others.
- **A shard's process killed.** Ray starts it again within seconds and it goes on from its last
  checkpoint. Workers repeat what was not answered. Lost is what it had applied since, never more
  than `every`, and what came in while the checkpoint was written.
  Under averaging workers send again what they had contributed to the round that was open. Should
  one of them have the mean of it already and have gone on, the shard waits for it for 10 seconds
  and makes the round of the others: that part of the center is then a mean without it, once.
- **The head's process killed.** Asynchronous rules need the head for nothing but membership;
  rounds wait for it.
- **A machine.** Its shards are started again on another one when Ray has declared it dead, which is
  what the wait consists of. Ray's head asks every machine `RAY_health_check_period_ms` = 3,000
  after its last answer, waits `RAY_health_check_timeout_ms` = 10,000 for the next, and gives up
  after `RAY_health_check_failure_threshold` = 5 in a row: some 15 seconds if the machine is up and
  says that nobody is there, about a minute if it is silent. They are set in the environment of
  `ray start --head`; *Ray looks sooner* is with a period and a timeout of 1,000.
- **Everything.** The storage is what the run goes on from. The wait is mostly the start of three
  Ray nodes and of the workers. The machine of Ray's own head is such a case: without it there is no
  cluster until it is started again.
- **`springline run` killed.** Its workers end with it, perhaps in the middle of an exchange. The
  center stays on the cluster, for ten minutes, and a run that is started again with the same
  `--run` goes on from there.
- **A link down.** Nothing is lost and nothing is applied twice. The wait is longer than the link
  was down, since TCP tries again in intervals that double. A machine that is away for longer than
  Ray waits is declared dead, and its node ends when it is back: that row is with Ray looking
  sooner, and the worker that was cut off is ended and started again elsewhere, as `springline run`
  does; its last exchange may have reached some shards and not others.
- **A worker stopped.** Under asynchronous rules nobody notices. A round of averaging waits for it
  for `grace`, and goes on without it; it takes part again in a round after it is back.
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
    written = options.out / "many-machines.md"
    page, _, before = (written.read_text("utf-8") if written.exists() else "").partition(HEADING)
    written.write_text(page + section(rows, before if options.only else ""), "utf-8")
    console.print(f"Written: {written}")
    raise SystemExit(any(row.error for row in rows))


if __name__ == "__main__":
    main()
