"""One worker is ten times slower: elastic averaging goes on without it, model averaging waits.

    python examples/straggler.py     runs both, one after the other, and draws straggler.png

A step sleeps 5 ms, and 50 ms on the slow worker, the last one. Each run ends when that one has made
its steps: both take as long, and what the others did meanwhile is the difference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from data import Bytes, mnist
from torch import Tensor, nn

import springline
from springline.monitor.metrics import Series, read_metrics
from springline.torch import ElasticAverageOptimizer, ModelAverageOptimizer

STEP, SLOWER = 0.005, 10  # seconds; times
LOOKS = {  # title, and a line that all eyes can tell from the other
    "elastic": ("elastic averaging", "#0072B2", "-"),
    "average": ("model averaging", "#D55E00", "--"),
}


def loss_of(model: nn.Module, images: Bytes, labels: Bytes) -> Tensor:
    scores = model(torch.from_numpy(images) / 255)
    return nn.functional.cross_entropy(scores, torch.from_numpy(labels).long())


def work(rule: str, steps: int, period: int) -> None:
    """What one worker does."""
    data = mnist()
    test = data.test_images[:1000], data.test_labels[:1000]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    opt: ElasticAverageOptimizer | ModelAverageOptimizer
    if rule == "average":
        opt = ModelAverageOptimizer(sgd, model=model, period=period)
    else:  # all start together, so that times can be compared
        opt = ElasticAverageOptimizer(sgd, model=model, period=period, synchronous=True)
    slow = springline.rank() == springline.workers() - 1
    for step in springline.steps(steps if slow else steps * SLOWER):
        rows = np.random.default_rng([springline.rank(), step]).integers(len(data.images), size=32)
        loss = loss_of(model, data.images[rows], data.labels[rows])
        opt.zero_grad()
        loss.backward()
        time.sleep(STEP * SLOWER if slow else STEP)
        opt.step()
        springline.log(loss=loss.item())
        if step % period == 0 and springline.rank() == 0:
            with opt.center_weights(), torch.no_grad():
                springline.log(center_loss=loss_of(model, *test).item())
    if slow:
        springline.stop()
    opt.finish()


def draw(runs: dict[str, dict[int, Series]], path: Path) -> None:
    """The center's loss as rank 0 saw it, and the steps of all workers."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, (rule, ranks) in enumerate(runs.items()):
        title, color, line = LOOKS[rule]
        seen = np.isfinite(ranks[0].values["center_loss"])
        seconds = (ranks[0].time - ranks[0].time[0])[seen]
        left.plot(seconds, ranks[0].values["center_loss"][seen], line, color=color, label=title)
        places = np.arange(len(ranks)) + 0.4 * n - 0.2
        bars = right.bar(places, [series.step[-1] for series in ranks.values()], 0.38, color=color)
        right.bar_label(bars)
    left.set(xlabel="time, s", ylabel="loss of the center, test images", ylim=(0, None))
    left.legend(frameon=False)
    names = [f"worker {rank}" for rank in ranks]
    names[-1] += f"\n({SLOWER} times slower)"
    right.set_xticks(range(len(names)), names)
    right.set(ylabel="steps in the same time")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--rule", choices=LOOKS, help="be one worker of a run, under this rule")
    add("--workers", type=int, default=3, help="of which the last is slow")
    add("--steps", type=int, default=200, help="of the slow worker")
    add("--period", type=int, default=5, help="τ, local steps between two exchanges")
    add("--out", type=Path, default=Path("runs", time.strftime("straggler-%Y-%m-%d-%H%M%S")))
    args = parser.parse_args()
    if args.rule:
        work(args.rule, args.steps, args.period)
        return
    runs = {}
    for rule in LOOKS:
        run = [sys.executable, "-m", "springline.cli", "run", "--run", str(args.out / rule)]
        script = [
            __file__,
            "--rule",
            rule,
            "--steps",
            str(args.steps),
            "--period",
            str(args.period),
        ]
        command = [*run, "--workers", str(args.workers), *script]
        if status := subprocess.run(command).returncode:
            raise SystemExit(status)
        runs[rule] = read_metrics(args.out / rule)
    draw(runs, args.out / "straggler.png")
    print(f"The plot is in {args.out / 'straggler.png'}")


if __name__ == "__main__":
    main()
