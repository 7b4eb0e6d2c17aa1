"""What springline adds to a TensorFlow step on parameter servers.

    python benchmarks/tensorflow_step.py            # minutes; writes docs/tensorflow-step.md, .svg
    python benchmarks/tensorflow_step.py --quick    # small models

Every setting is a cluster of its own, one server and one or two workers, all on this machine. The
worker times the bare optimizer, a raw pull and push, and ours, one after the other, in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from tensorflow_step_report import Row, checks, draw, page

from springline.launch.process import cores

TASK = Path(__file__).with_name("tensorflow_step_task.py")
MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "9999999999",
    "MALLOC_ARENA_MAX": "1",
}


class Case(NamedTuple):
    """One cluster."""

    model: str
    variables: int
    size: int  # of a variable
    rounds: int
    workers: int
    settings: bool  # of memory


def cases(quick: bool) -> Iterator[Case]:
    """All settings."""
    for settings in (True, False):
        for workers in (1, 2):
            size, rounds = (10_000, 4) if quick else (8_400_000, 40)
            yield Case("large", 3, size, rounds, workers, settings)
    yield Case("many small", 50, 256, 4 if quick else 300, 1, True)


def run(case: Case) -> list[dict[str, list[float]]]:
    """Start the cluster, wait for its workers, end its server; return the workers' times."""
    addresses = _addresses(1 + case.workers)
    jobs = {"ps": addresses[:1], "worker": addresses[1:]}
    threads = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    base = os.environ | threads | (MEMORY if case.settings else {})

    def start(job: str, task: int) -> subprocess.Popen[str]:
        place = {"cluster": jobs, "task": {"type": job, "index": task}}
        command = [sys.executable, str(TASK), *map(str, (case.variables, case.size, case.rounds))]
        return subprocess.Popen(
            command,
            env=base | {"TF_CONFIG": json.dumps(place)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    server = start("ps", 0)
    try:
        workers = [start("worker", k) for k in range(case.workers)]
        found = []
        for worker in workers:
            out, err = worker.communicate()
            if worker.returncode:
                raise SystemExit(f"A worker failed:\n{err[-3000:]}")
            found.append(json.loads(out.splitlines()[-1]))
        return found
    finally:
        server.kill()
        server.communicate()


def _addresses(n: int) -> list[str]:
    """Return addresses that are free now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in held]
    for s in held:
        s.close()
    return addresses


def main() -> None:
    """Measure, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    if os.geteuid() == 0 and "SPRINGLINE_ALONE" not in os.environ:
        # TensorFlow's servers listen on all interfaces: leave them none but the loopback.
        os.environ["SPRINGLINE_ALONE"] = "1"
        inside = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", inside, "sh", sys.executable, *sys.argv])
    rows, todo, console = [], list(cases(options.quick)), Console()
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:
            progress.update(bar, description=f"{case.model}, {case.workers} workers")
            rows.append(Row.of(case, run(case)))
            progress.advance(bar)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(rows, options.out / "tensorflow-step.svg")
    command = "python benchmarks/tensorflow_step.py" + " --quick" * options.quick
    written = options.out / "tensorflow-step.md"
    written.write_text(page(rows, command), "utf-8")
    for check in checks(rows):
        console.print(f"{check.mark} {check.what}: {check.measured}; target: {check.target}")
    console.print(f"Written: {written} and the plot beside it ({cores()} cores)")


if __name__ == "__main__":
    main()
