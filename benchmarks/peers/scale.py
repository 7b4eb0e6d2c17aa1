"""How many exchanges a second a center takes, by its number of workers, and their memory.

    python benchmarks/peers/scale.py            # minutes; writes docs/scale.md, .jsonl and .svg
    python benchmarks/peers/scale.py --quick    # two workers, no Ray

Every worker is a process that exchanges as often as it can, under elastic averaging. Ray's cluster
is on a network with a loopback only, where the machine allows it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
from exchange import center_directory, memory
from pages import facts, markdown
from scale_worker import memory_of

WORKER = Path(__file__).with_name("scale_worker.py")
COLUMNS = ("center", "model", "workers", "exchanges a second", "of each worker", "GB a second",
           "MB added to a worker", "MB of the center")  # fmt: skip
COLOURS = {"shared": "#1f6fb2", "ray": "#c8553d"}
NAMES = {"shared": "shared memory", "ray": "Ray, 2 shards"}


class Row(NamedTuple):
    """A center and its workers."""

    center: str
    parameters: int
    workers: int
    rate: float  # exchanges of all workers in a second
    added: float  # bytes of a worker beside its model, the mean
    held: int  # bytes of the center

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        rate = _short(self.rate), _short(self.rate / self.workers)
        moved = f"{self.rate * 4 * self.parameters / 1e9:.2f}"
        size = f"{self.parameters / 1e6:g} M"
        mega = f"{self.added / 1e6:.1f}", f"{self.held / 1e6:.1f}"
        return [NAMES[self.center], size, str(self.workers), *rate, moved, *mega]


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def measure(
    kind: str, where: str | Path, parameters: int, workers: int, seconds: float, held: Any
) -> Row:
    """Let workers exchange for some seconds."""
    given = map(str, (WORKER, kind, where, workers, parameters))
    command, pipe = [sys.executable, *given], subprocess.PIPE
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(workers):
            words = [*command, str(rank)]
            started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
        _lines(started)  # all have joined
        for process in started:
            _tell(process, str(seconds))
        found = [json.loads(line) for line in _lines(started)]
        nbytes = held()
        for process in started:
            _tell(process, "leave")
            process.wait()
    finally:
        for process in started:
            process.kill()
    rate, added = (sum(f[name] for f in found) for name in ("rate", "added"))
    return Row(kind, parameters, workers, rate, added / workers, nbytes)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    print(line, file=process.stdin, flush=True)


def _lines(started: list[subprocess.Popen[str]]) -> list[str]:
    lines = [process.stdout.readline() for process in started if process.stdout]
    if not all(lines):
        raise SystemExit("A worker has ended: see above.")
    return lines


def on_shared_memory(parameters: int, workers: int, seconds: float) -> Row:
    """Measure a center of this machine."""
    with center_directory() as directory:

        def held() -> int:
            return memory(directory).stat().st_blocks * 512

        return measure("shared", directory, parameters, workers, seconds, held)


def on_ray(parameters: int, counts: list[int], seconds: float) -> Iterator[Row]:
    """Measure centers of two shards, on a cluster of one node."""
    cluster: Any = importlib.import_module("ray_cluster")
    with cluster.ray_cluster(nodes=1, object_store_memory=1_000_000_000):
        for workers in counts:
            name, address = f"scale-{workers}", os.environ["RAY_ADDRESS"]

            def held(name: str = name) -> int:
                actors = cluster.actors_of(name).values()
                return sum(memory_of(cluster.pid_of(actor))["own"] for actor in actors)

            yield measure("ray", address, parameters, workers, seconds, held)
            cluster.end_center(name)


def rows_of(quick: bool) -> Iterator[Row]:
    """Measure everything."""
    seconds = 0.2 if quick else 3.0
    counts = [1, 2] if quick else [1, 2, 4, 8, 16, 32, 64]
    sizes = {100_000: counts} if quick else {1_000_000: counts, 25_000_000: counts[:4]}
    for parameters, numbers in sizes.items():
        for workers in numbers:
            yield on_shared_memory(parameters, workers, seconds)
    if not quick:
        yield from on_ray(1_000_000, counts[:5], seconds)


def page(rows: list[Row], command: str, load: float) -> str:
    """Return the page."""
    best = max((row for row in rows if row.center == "shared"), key=lambda row: row.rate)
    most = max((row for row in rows if row.parameters == best.parameters), key=lambda r: r.workers)
    many = f"With {most.workers} it takes {_short(most.rate)}." if most != best else ""
    return "\n".join(
        [
            "# The number of workers",
            "",
            f"The shared center takes most exchanges with {best.workers} "
            f"worker{'s' * (best.workers > 1)}: "
            f"{_short(best.rate)} a second of {best.parameters / 1e6:g} M parameters. {many}",
            "",
            "![Exchanges a second by number of workers](scale.svg)",
            "",
            f"Made by `{command}`. {facts('ray')} The load before it began was {load:.1f} (of "
            f"{os.cpu_count()} cores). Figures: [scale.jsonl](scale.jsonl).",
            "",
            _READING,
            "",
            *markdown(COLUMNS, (row.cells() for row in rows)),
            "",
        ]
    )


def draw(rows: list[Row], path: Path) -> None:
    """Draw exchanges a second by number of workers."""
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style | {"svg.hashsalt": path.stem}):
        figure = Figure(figsize=(6.2, 3.8), layout="constrained")
        panel = figure.subplots()
        for kind, parameters in dict.fromkeys((row.center, row.parameters) for row in rows):
            line = [row for row in rows if (row.center, row.parameters) == (kind, parameters)]
            small = parameters == rows[0].parameters
            panel.plot(
                [row.workers for row in line],
                [row.rate for row in line],
                color=COLOURS[kind],
                marker="o",
                markersize=4,
                linestyle="-" if small else "--",
                label=f"{NAMES[kind]}, {parameters / 1e6:g} M parameters",
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        panel.set_xlabel("workers")
        panel.set_ylabel("exchanges a second, all workers")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})


_READING = """\
Every worker exchanges without a pause, as no training does: this is the most that a center takes,
with all workers on the cores of one machine. *GB a second* is a model's bytes times the exchanges.
*Added to a worker* is what its process holds beside an interpreter with numpy (on Ray: connected
to the cluster) and its model, without the center that it maps: its share (PSS) of anonymous and
file memory. *The center* is its file in shared memory; on Ray the processes of head and shards,
interpreters included."""


def main() -> None:
    """Measure, print, and write the figures, the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="two workers, no Ray")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the workers
    load, rows = os.getloadavg()[0], list[Row]()
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "scale.md"
    command = "python benchmarks/peers/scale.py" + " --quick" * options.quick
    for row in rows_of(options.quick):
        rows.append(row)
        print("  ".join(row.cells()), flush=True)
        lines = [json.dumps(row._asdict()) for row in rows]
        written.with_suffix(".jsonl").write_text("\n".join([*lines, ""]), "utf-8")
        written.write_text(page(rows, command, load), "utf-8")  # what there is so far
    draw(rows, written.with_suffix(".svg"))
    print(f"Written: {written}, its figures and its plot")


if __name__ == "__main__":
    main()
