"""Training over slow links: the share of time spent computing, by τ, beside DDP.

    python benchmarks/links.py            # eight minutes; writes docs/links.md and docs/links.svg
    python benchmarks/links.py --quick    # a small model, few steps

Three hosts are namespaces on this machine, each with a Ray node, so this needs Linux and root. The
center is on the first, the two workers are on the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

from links_network import HERE, Link, hosts, measure, slow_links, traffic
from links_plot import draw
from links_report import Findings, Row, page
from links_worker import ALONE, COLLECTIVE, DDP, RAY, Case, Result, Settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINK = Link(mbits=100, delay=0.02)
WORKERS = 2
WORKER = HERE / "links_worker.py"


class Size(NamedTuple):
    """How much is measured."""

    width: int  # of the model's layers
    seconds: float  # of a step
    steps: dict[int, int]  # by period, without overlap
    overlapping: int  # steps with overlap, at least
    probe: float  # seconds for which the link is measured

    @property
    def settings(self) -> Settings:
        """What all cases have in common; where they run is not known yet."""
        return Settings("", "", WORKERS, 2, self.width, self.seconds, list(self.steps))

    def cases(self) -> list[Case]:
        """Return all cases."""
        least, most = min(self.steps), max(self.steps)
        found = [
            Case(ALONE, 1, False, self.overlapping // 2, WORKERS),
            Case(DDP, 1, False, self.steps[least], WORKERS),
            Case(RAY, least, False, self.steps[least], 1),
            Case(RAY, most, False, self.steps[most], WORKERS, apart=True),
        ]
        for kind in (RAY, COLLECTIVE):
            for period, steps in self.steps.items():
                more = steps if kind == COLLECTIVE else max(steps, self.overlapping)
                found.append(Case(kind, period, False, steps, WORKERS))
                found.append(Case(kind, period, True, more, WORKERS))
        return found


FULL = Size(512, 0.05, {1: 30, 10: 150, 100: 400}, 400, 5.0)
QUICK = Size(128, 0.01, {1: 4, 10: 20}, 40, 0.5)


class Workers:
    """Processes on the last hosts, and the case that they are at."""

    def __init__(self, cluster: Any, settings: Settings, errors: IO[str]) -> None:
        self._cluster, self._errors = cluster, errors
        given = json.dumps(settings)
        self._processes = [
            host.start(
                *(sys.executable, WORKER, "serve", given, str(rank)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, host in enumerate(cluster.all[1:])
        ]

    def run(self, case: Case) -> Row:
        """Let all workers do a case."""
        self._tell(json.dumps(case))
        self._hear()
        before = [traffic(host) for host in self._cluster.all]
        self._tell("go")
        results = [Result(**said) for said in map(json.loads, self._hear()) if said]
        after = [traffic(host) for host in self._cluster.all]
        self._tell("end")
        pairs = zip(before, after, strict=True)
        return Row.of(case, results, [(b[0] - a[0], b[1] - a[1]) for a, b in pairs])

    def _tell(self, line: str) -> None:
        for process in self._processes:
            print(line, file=process.stdin, flush=True)

    def _hear(self) -> list[str]:
        lines = [process.stdout.readline() for process in self._processes]
        if not all(lines):
            raise _failed("A worker has ended", self._errors)
        return lines


def measured(cluster: Any, size: Size, console: Console) -> Findings:
    """Do all cases, on a cluster of one host to which the workers' are added."""
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    todo, rows = size.cases(), list[Row]()
    with Progress(*bar, console=console) as progress, tempfile.TemporaryFile("w+") as errors:
        task = progress.add_task("three hosts start", total=len(todo))
        settings = size.settings._replace(address=cluster.address)
        make = (sys.executable, WORKER, "make", json.dumps(settings))
        if cluster[0].start(*make, stderr=errors).wait():  # while it is the only host there is
            raise _failed("The centers could not be made", errors)
        for _ in range(WORKERS):
            cluster.add()
        settings = settings._replace(meeting=cluster[1].address)
        with slow_links(cluster, LINK) as how:
            link = measure(cluster, how, size.probe)
            trip, rate = 1e3 * link.round_trip, 8e-6 * link.bytes_per_second
            progress.print(f"The link: {trip:.1f} ms there and back, {rate:.1f} Mbit/s")
            workers = Workers(cluster, settings, errors)
            for case in todo:
                progress.update(task, description=case.title)
                rows.append(workers.run(case))
                progress.print(f"{case.title}: {rows[-1].rate:.2f} steps/s")
                progress.advance(task)
    return Findings(rows, settings, link)


def _failed(what: str, errors: IO[str]) -> RuntimeError:
    errors.seek(0)
    return RuntimeError(f"{what}: {errors.read()[-3000:]}")


def main() -> None:
    """Measure, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    if why := hosts.missing():
        raise SystemExit(f"There can be no hosts on this machine: {why}.")
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    console, load = Console(), os.getloadavg()[0]
    command = "python benchmarks/links.py" + " --quick" * options.quick
    written = options.out / "links.md"
    options.out.mkdir(parents=True, exist_ok=True)
    with hosts.Hosts(1) as cluster:
        found = measured(cluster, QUICK if options.quick else FULL, console)
        draw(found, options.out / "links.svg")
        written.write_text(page(found, LINK, command, load), "utf-8")
    for row in found.rows:
        share, expected = found.share(row), found.expected(row).share
        console.print(f"{row.case.title}: computing {share:.1%}; formula: {expected:.1%}")
    console.print(f"Written: {written} and the plot beside it")


if __name__ == "__main__":
    main()
