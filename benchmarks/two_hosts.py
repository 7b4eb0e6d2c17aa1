"""What an exchange costs between two hosts, against what the same bytes need on the same link.

    python benchmarks/two_hosts.py            # minutes, as root; writes docs/two-hosts.md
    python benchmarks/two_hosts.py --quick    # a small model

The hosts are network namespaces on this machine, made as the tests make them; `tc` limits their
links. On Ray the center is on one host and the worker on the other; a process group has a rank on
each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from collective_report import TARGET as GROUP_TARGET
from collective_report import rows_of
from collective_worker import Case as GroupCase
from collective_worker import Times as GroupTimes
from exchange_report import Quartiles
from pages import facts, markdown
from rich.console import Console
from two_hosts_worker import Case as RayCase
from two_hosts_worker import Times as RayTimes

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))
hosts: Any = importlib.import_module("hosts")
WORKER = HERE / "two_hosts_worker.py"
RAY_TARGET = 1.1  # times Ray's own transfer, at 1 Gbit/s
COLUMNS = ("", "link", "what", "bytes alone, ms", "exchange, ms", "÷", "quartiles", "target")


class Size(NamedTuple):
    """How much is measured."""

    parameters: int
    gbits: Sequence[float]
    rounds: int


FULL = Size(25_000_000, (1, 4), 8)
QUICK = Size(500_000, (1,), 2)


@dataclass(frozen=True)
class Row:
    """An exchange over a link."""

    gbits: float
    what: str
    alone: Quartiles  # ms
    exchange: Quartiles  # ms
    ratio: Quartiles
    target: float

    @property
    def mark(self) -> str:
        """Whether the target is met."""
        return "✓" if self.ratio.median <= self.target else "✗"

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        spread = f"{self.ratio.low:.2f} to {self.ratio.high:.2f}"
        times = [str(self.alone), str(self.exchange), f"{self.ratio.median:.2f}", spread]
        return [self.mark, f"{self.gbits:g} Gbit/s", self.what, *times, f"{self.target:g}"]


def run(started: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Return what each process prints."""
    found = []
    for process in started:
        said, complaint = process.communicate(timeout=1200)
        if process.returncode:
            raise RuntimeError(f"A worker has ended: {complaint[-3000:]}")
        found.append(json.loads(said) if said else {})
    return found


def begin(host: Any, *words: object) -> subprocess.Popen[str]:
    """Start a worker on a host."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = host.start(sys.executable, WORKER, *words, **streams)
    return process


def on_ray(size: Size, gbits: float, shards: int) -> Row:
    """Measure a worker on one host and a center on the other."""
    case = RayCase(size.parameters, shards, size.rounds)
    room = f"--object-store-memory={max(100_000_000, 8 * 4 * size.parameters)}"
    with hosts.Hosts(1, options=(room,)) as cluster:
        given = cluster.address, json.dumps(case)
        run([begin(cluster[0], "make", *given)])  # while it is the only host
        cluster.add()
        _limit(cluster, gbits)
        (found,) = run([begin(cluster[1], "ray", *given)])
    times = RayTimes(**found)
    what = f"elastic on Ray, {shards} shard{'s' * (shards > 1)}"
    alone, exchange = (
        Quartiles.of(1e3 * second for second in seconds)
        for seconds in (times.alone, times.exchange)
    )
    ratio = Quartiles.of(e / a for e, a in zip(times.exchange, times.alone, strict=True))
    return Row(gbits, what, alone, exchange, ratio, RAY_TARGET)


def in_a_group(size: Size, gbits: float) -> Iterator[Row]:
    """Measure two ranks, each on a host."""
    case = GroupCase(size.parameters, 2, size.rounds)
    with hosts.Hosts(2, ray=False) as cluster, tempfile.TemporaryDirectory() as folder:
        _limit(cluster, gbits)
        given = str(Path(folder) / "store"), json.dumps(case)
        ranks = [begin(host, "group", rank, *given) for rank, host in enumerate(cluster.all)]
        for row in rows_of(case, [GroupTimes(**t) for t in run(ranks)]):
            what = f"{row.rule} in a process group, 2 ranks"
            yield Row(gbits, what, row.bare, row.exchange, row.ratio, GROUP_TARGET)


def _limit(cluster: Any, gbits: float) -> None:
    for host in cluster.all:
        host.shape(f"{1000 * gbits:g}mbit")


def page(rows: Sequence[Row], size: Size, command: str, load: float) -> str:
    """Return the page."""
    bytes_ = f"{size.parameters / 1e6:g} M float32 parameters ({4 * size.parameters / 1e6:g} MB)"
    return "\n".join(
        [
            "# An exchange between two hosts",
            "",
            f"Made by `{command}`. {facts()} {bytes_}, {size.rounds} rounds. The load before it "
            f"began was {load:.1f} (of {os.cpu_count()} cores).",
            "",
            _READING,
            "",
            *markdown(COLUMNS, (row.cells() for row in rows)),
            "",
        ]
    )


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the page goes")
    options = parser.parse_args()
    if why := hosts.missing():
        raise SystemExit(f"There can be no hosts on this machine: {why}.")
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    console, load = Console(), os.getloadavg()[0]
    size = QUICK if options.quick else FULL
    rows: list[Row] = []
    with console.status("two hosts start") as status:
        for gbits in size.gbits:
            for shards in (1, 2):
                status.update(f"Ray over {gbits:g} Gbit/s, {shards} shards")
                rows.append(on_ray(size, gbits, shards))
                console.print(*rows[-1].cells())
            status.update(f"a process group over {gbits:g} Gbit/s")
            for row in in_a_group(size, gbits):
                rows.append(row)
                console.print(*row.cells())
    options.out.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/two_hosts.py" + " --quick" * options.quick
    written = options.out / "two-hosts.md"
    written.write_text(page(rows, size, command, load), "utf-8")
    console.print(f"Written: {written}")


_READING = """\
The hosts are network namespaces on one machine, so that they share its cores and its memory; only
the link between them is limited, in both directions (`tc`, `tbf`). *Bytes alone* is, on Ray, one
`ray.put` of the buffer, an actor on the other host that gets it and returns one of the same size,
and a `ray.get` of that; in a process group, one `all_reduce` of the buffer. Exchanges and these
alternate. What an exchange adds are its passes over memory, which take the same time whatever the
link is: the same comparison without a network is in
[an exchange over a process group](collective.md#what-an-exchange-costs)."""


if __name__ == "__main__":
    main()
