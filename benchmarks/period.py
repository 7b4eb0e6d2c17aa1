"""How long the period may be: the final loss of 2, 4 and 8 workers against it, for each rule.

    python benchmarks/period.py                     # an hour; writes docs/period.md and .svg
    python benchmarks/period.py --minutes 20        # fewer runs, the most important first
    python benchmarks/period.py --quick             # a tiny model
    python benchmarks/period.py --minutes 0         # only the page, of the runs made before

All workers of a run make their steps in lock-step, in one process; they are springline's own
workers, on a center of that process. Every run is added to docs/period.jsonl, so that a sweep that
was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from argparse import Namespace
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import import_module
from pathlib import Path

import torch
from period_plan import QUICK, WHOLE, Results, Run, Scale, append, load
from period_report import draw, page
from time_to_loss import EXAMPLES, make
from time_to_loss_runs import Job, Setting
from time_to_loss_runs import Scale as RealScale

from springline.center import NonFiniteError


def train(run: Run, scale: Scale) -> float:
    """Make a run in lock-step; return the loss of its center on held-out text."""
    from shakespeare import GPT, evaluate  # on the path only here
    from time_to_loss_worker import lockstep, texts

    torch.set_num_threads(1)
    (workers, rule, outer), whole = run.family, run.family.rule == WHOLE
    args = Namespace(**scale.model, rule=rule, steps=scale.steps, lr=run.rate, seed=run.seed)
    args.lockstep, args.batch = (1, workers * args.batch) if whole else (workers, args.batch)
    args.period, args.outer, args.moving_rate = run.period or scale.steps, outer, None
    text, held_out, characters = texts(args.context, args.part)
    torch.manual_seed(run.seed)
    model = GPT(characters, args.context, args.width, args.layers, args.heads)
    try:
        _, values = lockstep(model, text, args)[-1]
    except NonFiniteError:
        return math.inf
    model.load_state_dict({name: torch.as_tensor(value) for name, value in values.items()})
    loss = evaluate(model, held_out)
    return loss if math.isfinite(loss) else math.inf


def train_apart(run: Run, scale: Scale) -> float:
    """Make a run as `springline run` does, each worker a process of its own."""
    setting = Setting(run.family.rule, run.period, None, run.family.outer)
    like = RealScale(steps=scale.steps, model=scale.model)
    return make(Job(setting, run.rate, seed=run.seed), like, lambda: None).final


def sweep(results: Results, minutes: float, processes: int, path: Path) -> None:
    """Make the runs that are wanted and that there is time for."""
    start, first = time.monotonic(), len(results.losses)
    flying: dict[Future[float], Run] = {}

    def add(run: Run, loss: float) -> None:
        results.losses[run] = loss
        append(path, run, loss)
        spent = (time.monotonic() - start) / 60
        print(f"{spent:5.1f} min, run {len(results.losses) - first}: {run}: {loss:.4f}", flush=True)

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=fork) as pool:
        while True:
            wanted = results.wanted() if time.monotonic() < start + 60 * minutes else iter(())
            run = next((run for run in wanted if run not in flying.values()), None)
            if run and run.real:
                add(run, train_apart(run, results.scale))
            elif run and len(flying) < processes:
                flying[pool.submit(train, run, results.scale)] = run
            elif flying:
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    add(flying.pop(future), future.result())
            else:
                return


def main() -> None:
    """Sweep, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60, help="in which runs are begun")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few settings")
    parser.add_argument("--fresh", action="store_true", help="forget the runs made before")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    python_path = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(python_path)  # of the processes
    sys.path.append(str(EXAMPLES))
    import_module("time_to_loss_worker")  # once, before processes are forked
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "period.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    results = load(path, QUICK if options.quick else Scale())
    try:
        sweep(results, options.minutes, options.processes, path)
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on from here.")
    if not results.losses:
        raise SystemExit("No run was made: give more `--minutes`.")
    (options.out / "period.md").write_text(page(results), "utf-8")
    draw(results, options.out / "period.svg")
    print(f"Written: {options.out / 'period.md'} and the plot beside it")


if __name__ == "__main__":
    main()
