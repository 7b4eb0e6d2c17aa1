"""An exchange against one memcpy of the same bytes, in the same run.

    python benchmarks/exchange.py            # minutes; writes docs/exchange.md and .svg
    python benchmarks/exchange.py --quick    # seconds; small models

Every worker is a process of its own, and all exchange through one shared center. Memcpys and
exchanges alternate, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import numpy as np
from exchange_report import Row, adam_check, checks, page, table
from exchange_worker import RULES, Case, Meeting, Times, work
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from springline import AGN, SharedCenter
from springline.center import Layout
from springline.center.memory_file import TMPFS
from springline.rules import Adam

EACH = 4  # memcpys and exchanges of a worker in a block, if there are several workers
FULL = {1_000_000: 200, 25_000_000: 40, 100_000_000: 12}  # repetitions of a worker
QUICK = {100_000: 12, 1_000_000: 12}
MANY = 150  # tensors
FRAGMENTS = 4  # of as many large tensors


def cases(sizes: dict[int, int], workers: Sequence[int], many_at: int) -> Iterator[Case]:
    """All settings: flat models, then many tensors and fragments with one worker."""
    for size, repetitions in sizes.items():
        for rule in RULES:
            for locked in (True, False):
                for p in workers:
                    each = 1 if p == 1 else EACH
                    case = Case(size, rule, locked, p, repetitions // each, each)
                    if locked or case.settings.outer.stateless:  # else it is refused
                        yield case
    for rule in RULES:
        yield Case(many_at, rule, True, 1, sizes[many_at], 1, tensors=MANY)
    for fragments in (1, FRAGMENTS):
        yield Case(many_at, "DiLoCo", True, 1, sizes[many_at], 1, 2 * FRAGMENTS, fragments)


def no_room(case: Case) -> str | None:
    """Say what is missing, if a case does not fit into memory."""
    status = os.statvfs(TMPFS)
    tmpfs = status.f_bavail * status.f_frsize
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    total = case.center_nbytes + case.private_nbytes
    if case.center_nbytes > 0.95 * tmpfs:
        return f"its center needs {case.center_nbytes / 1e9:.1f} GB of a tmpfs of {tmpfs / 1e9:.1f}"
    if total > 0.9 * free:
        return f"it needs {total / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"
    return None


def measure(case: Case, context: ForkServerContext) -> Row:
    """Run the workers of a case."""
    note = no_room(case)
    if note:
        return Row(case, note=note)
    with center_directory() as directory:
        meeting = Meeting(context.Barrier(case.workers), context.Value("i", 0))
        processes: list[ForkServerProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(case.workers):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=work, args=(case, rank, directory, meeting, theirs)
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            times = _results(case, processes, pipes)
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for process in processes:
                process.join()
        return Row.of(case, times, memory(directory).stat().st_blocks * 512)


def _results(
    case: Case, processes: Sequence[ForkServerProcess], pipes: Sequence[Connection]
) -> list[Times]:
    times: list[Times] = []
    open_pipes = list(pipes)
    while open_pipes:
        for pipe in wait(open_pipes):
            rank = pipes.index(pipe)
            try:
                times.append(pipes[rank].recv())
            except EOFError:
                processes[rank].join()
                raise RuntimeError(
                    f"Worker {rank} of `{case.what}` ended with status {processes[rank].exitcode}."
                ) from None
            open_pipes.remove(pipes[rank])
    return sorted(times, key=lambda t: t.rank)


@contextmanager
def center_directory() -> Iterator[Path]:
    """Give a directory for a center, and free it with the center's memory."""
    with tempfile.TemporaryDirectory(prefix="springline-bench-") as home:
        directory = Path(home) / "center"
        try:
            yield directory
        finally:
            if (directory / "layout.json").exists():
                shutil.rmtree(memory(directory).parent, ignore_errors=True)  # another may sweep it


def memory(directory: Path) -> Path:
    """Return the file that a center is mapped from."""
    return directory / str(json.loads((directory / "layout.json").read_text("utf-8"))["memory"])


def adam_nbytes(parameters: int) -> int:
    """Return the bytes of a center of AGN with Adam."""
    values = {"w": np.zeros(parameters, np.float32)}
    with center_directory() as directory:
        rule = AGN(outer=Adam(1e-3))
        SharedCenter.create_or_join(directory, Layout.of(values), rule, values).close()
        return memory(directory).stat().st_blocks * 512


def main() -> None:
    """Measure, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small models, seconds")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    sizes, workers = (QUICK, (1, 2)) if options.quick else (FULL, (1, 2, 4))
    many_at = sorted(sizes)[1]
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the workers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["springline"])
    console, todo, rows = Console(), list(cases(sizes, workers, many_at)), []
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console) as progress:
        task = progress.add_task("", total=len(todo))
        for case in todo:
            progress.update(task, description=case.what)
            rows.append(measure(case, context))
            if rows[-1].note:
                progress.print(f"Skipped: {case.what}: {rows[-1].note}")
            elif not console.is_terminal:
                progress.print(f"{len(rows)}/{len(todo)} {case.what}: {rows[-1].alone} memcpys")
            progress.advance(task)
    found = [*checks(rows), adam_check(many_at, adam_nbytes(many_at))]
    from exchange_plot import draw  # not at the top, which every worker imports

    options.out.mkdir(parents=True, exist_ok=True)
    draw(rows, options.out / "exchange.svg")
    command = "python benchmarks/exchange.py" + (" --quick" if options.quick else "")
    (options.out / "exchange.md").write_text(page(rows, found, command), "utf-8")
    console.print(table(rows))
    for check in found:
        console.print(f"{check.mark} {check.what}: {check.measured}; target: {check.target}")
    console.print(f"Written: {options.out / 'exchange.md'} and {options.out / 'exchange.svg'}")


if __name__ == "__main__":
    main()
