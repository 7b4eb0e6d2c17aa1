"""What an exchange on Ray costs, against the least that Ray needs for the same bytes.

    python benchmarks/ray_exchange.py            # minutes; writes docs/ray-exchange.md and .png
    python benchmarks/ray_exchange.py --quick    # a small model

Every worker is a process of its own, connected to one Ray node on this machine. The least is one
`ray.put` of the worker's buffer, an actor that gets it and returns one of its own, and a `ray.get`
of that. Memcpys, bare transfers and exchanges alternate, in step with all other workers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import ray
from ray_exchange_report import Row, draw, page
from ray_exchange_worker import Case, Times, make_givers, send
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from springline.center.ray import NAMESPACE

FULL = [
    Case(25_000_000, p, s, 20, rule)
    for rule in ("elastic", "averaging", "AGN")
    for p in (1, 2, 4)
    for s in (1, 2, 4, 8)
]
QUICK = [Case(4_000_000, 2, 2, 3, rule) for rule in ("elastic", "averaging", "AGN")]
_BUFFERS = 20  # of the model's size that Ray's memory has room for
_INSIDE = "SPRINGLINE_BENCHMARK_NETWORK"


def timed(case: Case, address: str) -> list[Times]:
    """Measure a case in new processes."""
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(case.workers, timeout=300)
    started: list[tuple[SpawnProcess, Connection]] = []
    try:
        for rank in range(case.workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=send, args=(case, rank, address, meeting, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        return [pipe.recv() for _, pipe in started]
    finally:
        for process, _ in started:
            process.join(30)
            process.kill()


def in_a_network_of_its_own() -> None:
    """Start again where Ray, which listens on all interfaces, can be reached by nobody else."""
    if os.geteuid() == 0 and shutil.which("unshare") and not os.environ.get(_INSIDE):
        again = [sys.executable, *sys.argv]
        script = 'ip link set lo up && exec "$@"'
        environment = os.environ | {_INSIDE: "1"}
        command = ["unshare", "--net", "sh", "-c", script, "sh", *again]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def main() -> None:
    """Measure, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    in_a_network_of_its_own()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    cases = QUICK if options.quick else FULL
    nbytes = 4 * cases[0].parameters
    console, load = Console(), os.getloadavg()[0]
    store = max(100_000_000, _BUFFERS * nbytes)
    context = ray.init(
        address="local",  # not one that is here already
        object_store_memory=store,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
    )
    buffer = np.ones(nbytes, np.uint8)
    touched = [ray.put(buffer) for _ in range(_BUFFERS - 4)]  # memory is slow the first time
    del touched
    givers = make_givers(max(case.shards for case in cases))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    rows: list[Row] = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("exchanges on Ray", total=len(cases))
        for case in cases:
            rows.append(Row.of(case, timed(case, context.address_info["gcs_address"])))
            progress.advance(task)
    for giver in givers:
        ray.kill(giver)
    ray.shutdown()
    options.out.mkdir(parents=True, exist_ok=True)
    draw(rows, options.out / "ray-exchange.png")
    command = "python benchmarks/ray_exchange.py" + " --quick" * options.quick
    written = options.out / "ray-exchange.md"
    written.write_text(page(rows, command, load), "utf-8")
    for row in rows:
        check = row.check
        console.print(f"{check.mark} {check.what}: {check.measured}; target: {check.target}")
    console.print(f"Written: {written} and the plot beside it")


if __name__ == "__main__":
    main()
