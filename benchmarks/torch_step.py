"""What springline adds to a training step, against the bare optimizer in the same run.

    python benchmarks/torch_step.py            # minutes; writes docs/torch-step.md and .svg
    python benchmarks/torch_step.py --quick    # seconds; small models

Every case is timed in a process of its own. The bare thing and ours alternate, so that a slow
moment of the machine hits both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch_step_cases import RULES, Case, measure
from torch_step_report import Row, page, table, targets


class Scale(NamedTuple):
    """How large the model is, and how many pairs are timed."""

    layers: int
    width: int
    steps: int
    exchanges: int
    periods: int


FULL = Scale(layers=6, width=2048, steps=40, exchanges=40, periods=12)
QUICK = Scale(layers=2, width=64, steps=4, exchanges=4, periods=2)
TINY = (1, 4)  # layers, width
TINY_PAIRS = 40
DELAY = 4  # steps of a period


def cases(scale: Scale, all_threads: tuple[int, ...]) -> Iterator[Case]:
    """All settings: the targets' with every number of threads, others with one."""
    model = (scale.layers, scale.width)
    for threads in all_threads:
        for rule in RULES:
            for optimizer in ("SGD", "AdamW"):
                yield Case("step", rule, optimizer, threads, *model, scale.steps)
        for rule in RULES:
            yield Case("tiny step", rule, "SGD", threads, *TINY, TINY_PAIRS)
        for rule in RULES:
            yield Case("exchange", rule, "SGD", threads, *model, scale.exchanges)
        for rule in RULES:
            yield Case("training", rule, "SGD", threads, *model, scale.periods, overlap=True)
    for rule in RULES:
        yield Case("training", rule, "AdamW", 1, *model, scale.periods, overlap=True)
        yield Case("training", rule, "SGD", 1, *model, scale.periods)
    for optimizer in ("SGD", "AdamW"):
        for how in ({"overlap": True}, {"delay": DELAY}):
            yield Case("training", "DiLoCo", optimizer, 1, *model, scale.periods, **how)


def timed(case: Case, context: ForkServerContext) -> Row:
    """Measure a case in a new process."""
    with ProcessPoolExecutor(1, context) as pool:
        return Row.of(case, pool.submit(measure, case).result())


def main() -> None:
    """Measure, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small models, seconds")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of the processes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["springline.torch", "torch._dynamo"])  # the slow ones
    todo = list(cases(QUICK, (1,)) if options.quick else cases(FULL, (1, 2)))
    console, rows = Console(), []
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=console) as progress:
        task = progress.add_task("", total=len(todo))
        for case in todo:
            progress.update(task, description=case.what)
            rows.append(timed(case, context))
            if not console.is_terminal:
                progress.print(f"{len(rows)}/{len(todo)} {case.what}: {rows[-1].measured}")
            progress.advance(task)
    from torch_step_plot import draw  # not at the top, which every process imports

    options.out.mkdir(parents=True, exist_ok=True)
    draw(rows, options.out / "torch-step.svg")
    command = "python benchmarks/torch_step.py" + " --quick" * options.quick
    (options.out / "torch-step.md").write_text(page(rows, command), "utf-8")
    console.print(table(rows))
    for check in (row.check for row in targets(rows)):
        console.print(f"{check.mark} {check.what}: {check.measured}; target: {check.target}")
    console.print(f"Written: {options.out / 'torch-step.md'} and {options.out / 'torch-step.svg'}")


if __name__ == "__main__":
    main()
