"""Two workers on two cores against one worker on one: the wall time to the same loss.

    python benchmarks/time_to_loss.py                # an hour; writes docs/time-to-loss.md, .svg
    python benchmarks/time_to_loss.py --minutes 20   # fewer settings, the most important first
    python benchmarks/time_to_loss.py --quick        # a minute; a tiny model

The model is the GPT of examples/shakespeare.py. Every run is added to docs/time-to-loss.jsonl, so
that an interrupted sweep goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from time_to_loss_plan import wanted
from time_to_loss_report import draw, page, summary
from time_to_loss_runs import QUICK, WHOLE, Job, Result, Results, Scale, append, load

from springline.launch.launcher import Launcher
from springline.launch.process import cores
from springline.launch.program import Program
from springline.launch.request import RestartPolicy

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
WORKER = HERE / "time_to_loss_worker.py"


def make(job: Job, scale: Scale, tick: Callable[[], None]) -> Result:
    """Make one run, as `springline run` would or in one process."""
    start, setting = time.monotonic(), job.setting
    with tempfile.TemporaryDirectory(prefix="springline-bench-") as home:
        curve = Path(home) / "curve.json"
        arguments: dict[str, Any] = {
            "rule": setting.rule,
            "period": setting.period,
            "moving_rate": setting.moving_rate,
            "outer": setting.outer,
            "threads": 1 if job.one_process else setting.threads,
            "lockstep": setting.workers if job.one_process else 0,
            "lr": job.rate,
            "steps": max(1, round(job.fraction * scale.steps)),
            "seed": job.seed,
            "curve": str(curve),
            **scale.model,
        }
        arguments["batch"] *= setting.all if setting.rule == WHOLE else 1
        if job.one_process:
            command = [sys.executable, str(WORKER), json.dumps(arguments)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failed = done.stderr if done.returncode else ""
        else:
            failed = _launch(arguments, setting.workers, Path(home) / "run", tick)
        if failed:
            raise SystemExit(f"A worker of `{job.what}` failed:\n{failed}")
        values = json.loads(curve.read_text("utf-8"))
    losses = [math.inf if loss is None else loss for loss in values["losses"]]
    return Result(values["seconds"], losses, time.monotonic() - start)


def _launch(
    arguments: dict[str, Any], workers: int, directory: Path, tick: Callable[[], None]
) -> str:
    """Start workers and wait for them; return the last lines of one that failed."""
    launcher = Launcher(
        Program(str(WORKER), [json.dumps(arguments)]),
        workers=workers,
        directory=directory,
        restarts=RestartPolicy(0),
        say=lambda _: None,
    )
    status = launcher.run(tick)
    if status and not launcher.failed:
        raise KeyboardInterrupt
    return "\n".join(launcher.failed.last_lines()) if launcher.failed else ""


def together(jobs: Iterator[Job]) -> list[Job]:
    """Return the next run, and with it the one after if each needs one core only."""
    found = list(islice(jobs, 2))
    return found if all(job.one_process for job in found) else found[:1]


def sweep(results: Results, minutes: float, path: Path, console: Console) -> None:
    """Make the runs that are wanted and that there is time for."""
    bar = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*bar, console=console) as progress:
        task = progress.add_task("", total=60 * minutes)
        while jobs := together(wanted(results, minutes)):
            spent, start = results.spent, time.monotonic()
            if spent >= 60 * minutes or spent + sum(map(results.cost, jobs)) > 60 * minutes:
                break
            words = "; ".join(job.what for job in jobs)
            progress.update(task, description=f"run {len(results.runs) + 1}: {words}")

            def tick(spent: float = spent, start: float = start) -> None:
                progress.update(task, completed=spent + time.monotonic() - start)

            with ThreadPoolExecutor() as pool:  # a launcher needs the main thread
                each = pool.map if len(jobs) > 1 else map
                runs = list(each(lambda job: make(job, results.scale, tick), jobs))
            for job, run in zip(jobs, runs, strict=True):
                results.runs[job] = replace(run, spent=run.spent / len(jobs))
                append(path, job, results.runs[job])
                progress.print(f"{job.what}: {run.final:.4f} after {run.wall:.1f} s")
        progress.update(task, description="done", completed=60 * minutes)


def main() -> None:
    """Sweep, print, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60, help="of all runs together")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few settings")
    parser.add_argument("--fresh", action="store_true", help="forget the runs made before")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where page and plot go")
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0. Received: {options.minutes:g}")
    if cores() < 2:
        raise SystemExit("Two workers need two cores; this process may use one.")
    python_path = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(python_path)  # of the workers
    options.out.mkdir(parents=True, exist_ok=True)
    path, console = options.out / "time-to-loss.jsonl", Console()
    if options.fresh:
        path.unlink(missing_ok=True)
    results = load(path, QUICK if options.quick else Scale())
    try:
        sweep(results, options.minutes, path, console)
    except KeyboardInterrupt:
        console.print("Interrupted: the same command goes on from here.")
    if not results.runs:
        raise SystemExit(1)
    command = f"python benchmarks/time_to_loss.py --minutes {options.minutes:g}"
    command += " --quick" * options.quick
    (options.out / "time-to-loss.md").write_text(page(results, command, options.minutes), "utf-8")
    draw(results, options.out / "time-to-loss.svg")
    console.print(summary(results))
    console.print(f"Written: {options.out / 'time-to-loss.md'} and the plot beside it")


if __name__ == "__main__":
    main()
