"""What an exchange over a process group costs, against a bare all-reduce of the same buffer.

    python benchmarks/collective.py            # a minute; writes docs/collective.md and .svg
    python benchmarks/collective.py --quick    # a small model

The page keeps what it says before the figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from collective_report import HEADING, draw, rows_of, section
from collective_worker import Case, Times, measure
from rich.console import Console

FULL = [Case(25_000_000, ranks, rounds=20) for ranks in (2, 4)]
QUICK = [Case(300_000, ranks=2, rounds=3)]


def timed(case: Case) -> list[Times]:
    """Measure a case in new processes."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(case.ranks, context) as pool,
    ):
        store = str(Path(folder) / "store")
        found = [pool.submit(measure, case, rank, store) for rank in range(case.ranks)]
        return [future.result() for future in found]


def main() -> None:
    """Measure, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    console, load = Console(), os.getloadavg()[0]
    rows = [r for case in (QUICK if options.quick else FULL) for r in rows_of(case, timed(case))]
    options.out.mkdir(parents=True, exist_ok=True)
    draw(rows, options.out / "collective.svg")
    command = "python benchmarks/collective.py" + " --quick" * options.quick
    written = options.out / "collective.md"
    before = written.read_text("utf-8").split(HEADING)[0] if written.exists() else ""
    written.write_text(before + section(rows, command, load), "utf-8")
    for check in (row.check for row in rows):
        console.print(f"{check.mark} {check.what}: {check.measured}; target: {check.target}")
    console.print(f"Written: {written} and the plot beside it")


if __name__ == "__main__":
    main()
