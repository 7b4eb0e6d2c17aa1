"""What springline is for, in about two minutes.

    python examples/demo.py

Two workers train the GPT of shakespeare.py under DiLoCo. One of them is killed on the way, with
`kill -9`, and comes back. Then one process makes as many steps with the data of both, which is what
DistributedDataParallel computes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich import print as show
from rich.table import Table

from springline.launch_state import LaunchState
from springline.monitor.metrics import read_metrics
from springline.monitor.status import NotARunError, StatusReader

SCRIPT = Path(__file__).with_name("shakespeare.py")
KILLED_AT = 0.4  # of its steps
LOOK = 0.1  # seconds between two looks at the run
VICTIM = 1  # the rank that is killed
LOSS = re.compile(r"^Validation loss of the center: (\S+)", re.M)
BYTES = re.compile(r"^Bytes exchanged: ([\d,]+)", re.M)
OTHERWISE = re.compile(r"^Bytes that synchronous data parallel would have sent: ([\d,]+)", re.M)


def start(directory: Path, workers: int, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "springline", "run", "--workers", str(workers)]
    return subprocess.Popen([*command, "--run", str(directory), str(SCRIPT), *options])


def kill_one(directory: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    """Wait until a worker has come to a step, and kill it."""
    reader = StatusReader(directory)
    while run.poll() is None:
        time.sleep(LOOK)
        try:
            status = reader.read()
        except NotARunError:  # not yet
            continue
        launch = LaunchState.read(directory)
        workers = dict(enumerate(status.workers))
        if launch and VICTIM in workers and workers[VICTIM].step >= step:
            pid = launch.workers[VICTIM].pid
            if pid:
                os.kill(pid, signal.SIGKILL)
                break
    reader.close()


def train(directory: Path, workers: int, options: list[str], kill_at: int | None = None) -> None:
    """Make a run from its beginning to its end; leave if it fails."""
    run = start(directory, workers, options)
    try:
        if kill_at is not None:
            kill_one(directory, kill_at, run)
        status = run.wait()
    except KeyboardInterrupt:  # the run has heard it, too, and saves its center
        status = run.wait()
    if status:
        raise SystemExit(status)


def draw(runs: dict[str, Path], path: Path) -> None:
    """Draw the validation loss of both against steps, and where a worker was killed."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4), layout="constrained")
    ax: Any = picture.add_subplot()
    for (name, directory), color in zip(runs.items(), ("black", "#D55E00"), strict=True):
        metrics = read_metrics(directory)
        losses = metrics[0].values["val_loss"]
        seen = losses == losses
        ax.plot(metrics[0].step[seen], losses[seen], ".-", color=color, label=name)
        if VICTIM in metrics:
            series = metrics[VICTIM]
            for step in series.step[series.begins]:
                ax.axvline(step, color="#0072B2", ls=":", label="a worker is killed, and is back")
    ax.set(xlabel="steps of each worker", ylabel="validation loss, nats per character")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:.1f}")
    ax.yaxis.set_minor_formatter("{x:.1f}")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=120)


def compare(two: Path, one: Path) -> Table:
    """What each has reached, and what it took."""
    table = Table("", "nats per character", "sent", "restarts")
    reports = [(run / "report.txt").read_text("utf-8") for run in (two, one)]
    rows = (
        ("two workers, DiLoCo", two, reports[0], BYTES),
        ("one process (DDP)", one, reports[1], OTHERWISE),
    )
    for name, run, report, sent in rows:
        loss, nbytes = LOSS.search(report), sent.search(reports[0])
        launch = LaunchState.read(run)
        if loss and nbytes and launch:
            restarts = sum(worker.restarts for worker in launch.workers)
            table.add_row(name, loss[1], f"{nbytes[1]} B", str(restarts))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="of each worker")
    args, model = parser.parse_known_args()  # all else is shakespeare.py's
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    two, one = (Path("runs") / f"{stamp}-{name}" for name in ("two-workers", "one-process"))
    steps = ["--steps", str(args.steps), *model]
    show(f"Two workers under DiLoCo. Worker {VICTIM} is killed on the way (kill -9).\n")
    train(two, 2, ["--rule", "diloco", *steps], kill_at=int(KILLED_AT * args.steps))
    show("\nOne process with the data of both, as DistributedDataParallel computes it.\n")
    train(one, 1, ["--batch", "24", *steps])
    runs = {"two workers, DiLoCo, one killed": two, "one process, twice the batch": one}
    draw(runs, two / "demo.png")
    show(compare(two, one))
    show(f"Both lines are in {two / 'demo.png'}.")


if __name__ == "__main__":
    main()
