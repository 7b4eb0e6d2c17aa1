"""The learning rate, and the outer optimizer, of four workers: the sweep that two have.

    python benchmarks/peers/tune.py --minutes 60    # writes docs/peers-tuning.jsonl

`time_to_loss.py` tuned two workers with the GPT of examples/shakespeare.py, and its runs are in
docs/time-to-loss.jsonl. This is the same grid, in the same way, for four with a smaller model: all
steps, the first seed, factors of two around the best learning rate; rules with rounds in lock-step
in one process, asynchronous ones by real runs on this machine. What was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import paths
from time_to_loss import make
from time_to_loss_plan import tune
from time_to_loss_runs import ALONE, WHOLE, Job, Results, Scale, Setting, append, load

WORKERS = 4
SIZES = {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 12, "part": 9}
SCALE = Scale(
    settings=(
        Setting(WHOLE, all=WORKERS),
        Setting("average", 10, all=WORKERS),
        Setting("diloco", 10, None, (0.7, 0.5), WORKERS),
        Setting("diloco", 50, None, (1.0, 0.5), WORKERS),
        Setting("elastic", 4, 0.9 / WORKERS, all=WORKERS),
        Setting("async_diloco", 10, None, (0.7, 0.5), WORKERS),
        Setting("average", 50, all=WORKERS),
        Setting("average", 4, all=WORKERS),
        Setting("elastic", 10, 0.9 / WORKERS, all=WORKERS),
        Setting("diloco", 10, None, (1.0, 0.5), WORKERS),
        Setting("diloco", 50, None, (0.7, 0.5), WORKERS),
        Setting("async_diloco", 50, None, (1.0, 0.5), WORKERS),
        Setting("diloco", 10, None, (0.7, 0.9), WORKERS),
        Setting("diloco", 50, None, (0.7, 0.9), WORKERS),
    ),
    model=SIZES,
)
NAME = "peers-tuning.jsonl"


def wanted(results: Results) -> Iterator[Job]:
    """Yield the runs that are still to be made; ask again after each."""
    for setting in (Setting(ALONE), *SCALE.settings):
        yield from tune(results, setting, SCALE.first_rate)


def main() -> None:
    """Make the runs that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60, help="of all runs together")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the runs are written")
    options = parser.parse_args()
    python_path = [str(paths.EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(python_path)  # of the workers
    results = load(path := options.out / NAME, SCALE)
    while (job := next(wanted(results), None)) is not None:
        if results.spent >= 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over; next would be: {job.what}")
            return
        results.runs[job] = make(job, SCALE, lambda: None)
        append(path, job, results.runs[job])
        final = results.runs[job].final
        print(f"{time.strftime('%H:%M:%S')} {job.what}: {final:.4f}", flush=True)
    print("All is tuned.")


if __name__ == "__main__":
    main()
