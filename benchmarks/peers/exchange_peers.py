"""An exchange of 100 MB between workers of one machine, beside what its peers need for one.

    python benchmarks/peers/exchange_peers.py            # minutes; docs/peers-exchange.md and .svg
    python benchmarks/peers/exchange_peers.py --quick    # a small model, without torchft

Without `--quick` the workers run in an environment of their own, which is made if needed. They are
on a network with a loopback only, where the machine allows it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

import environment
from exchange import memory
from exchange_figures import Row, draw, page, rows_of
from exchange_systems import Case

HERE = Path(__file__).parent
network: Any = importlib.import_module("network")
FULL = [Case(workers, 12, 24, 1020, torchft=True) for workers in (2, 4)]
QUICK = [Case(2, 2, 4, 100, torchft=False)]


MODELS = 42  # that a worker with all systems holds at most


def no_room(case: Case) -> str | None:
    """Say what is missing, if a case does not fit into memory: others may be on the machine."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    needed = case.workers * MODELS * 4 * case.parameters
    if needed < 0.9 * free:
        return None
    return f"{case.workers} workers need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"


def measure(case: Case, python: Path) -> list[dict[str, list[float]]]:
    """Return the seconds of each worker, by system."""
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    own |= {"SPRINGLINE_WORKERS": str(case.workers), "RUST_LOG": "warn"}
    with tempfile.TemporaryDirectory(prefix="springline-bench-") as directory:
        started = [
            subprocess.Popen(
                [python, HERE / "exchange_systems.py", str(rank), json.dumps(case), directory],
                env=os.environ | own | {"SPRINGLINE_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(case.workers)
        ]
        try:
            said = [process.communicate()[0] for process in started]
        finally:
            for process in started:
                process.kill()
            for layout in Path(directory).glob("*/layout.json"):
                shutil.rmtree(memory(layout.parent).parent, ignore_errors=True)
    if any(process.returncode for process in started):
        raise SystemExit("A worker has ended: see above.")
    return [json.loads(lines) for lines in said]


def main() -> None:
    """Measure, print, and write the figures, the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small model, without torchft")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    load, rows = os.getloadavg()[0], list[Row]()
    python = Path(sys.executable) if options.quick else environment.python()
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "peers-exchange.md"
    command = "python benchmarks/peers/exchange_peers.py" + " --quick" * options.quick
    skipped = []
    with network.private_network():
        for case in QUICK if options.quick else FULL:
            print(f"{case.workers} workers, {case.parameters / 1e6:g} M parameters", flush=True)
            if why := no_room(case):
                skipped.append(f"Skipped: {why}.")
                print(skipped[-1], flush=True)
                continue
            new = rows_of(case, measure(case, python))
            rows += new
            for row in new:
                print("  ", *row.cells(), sep="  ", flush=True)
            lines = [json.dumps(row._asdict()) for row in rows]
            written.with_suffix(".jsonl").write_text("\n".join([*lines, ""]), "utf-8")
    if rows:
        draw(rows, written.with_suffix(".svg"))
        written.write_text(page(rows, skipped, command, load), "utf-8")
        print(f"Written: {written}, its figures and its plot")


if __name__ == "__main__":
    main()
