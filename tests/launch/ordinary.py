"""Ordinary training scripts, each in a function: one weight that counts the steps.

The gradient is −1 and the learning rate 1: after n steps the weight is what it began with plus n.
"""

import os
import sys
import time
from pathlib import Path

import torch

import springline
from springline.torch import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer

torch.set_num_threads(1)
RANK, RUN = springline.rank(), springline.directory() or Path()
RULES = {
    "average": lambda inner, tau, **k: ModelAverageOptimizer(inner, period=tau, **k),
    "elastic": lambda inner, tau, **k: ElasticAverageOptimizer(inner, period=tau, **k),
    "agn": lambda inner, tau, **k: AGNOptimizer(inner, period=tau, **k),
}


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))


def make(rule, tau, **options):
    model = Counter()
    return model, RULES[rule](
        torch.optim.SGD(model.parameters(), lr=1.0), tau, model=model, **options
    )


def step(model, opt, seconds=0.0):
    opt.zero_grad()
    (-model.w.sum()).backward()
    opt.step()
    time.sleep(seconds)


def dies_once(when):
    """Whether this is the first incarnation of the process, and `when` holds."""
    mark = RUN / f"died-{RANK}"
    if not when or mark.exists():
        return
    mark.touch()
    os.kill(os.getpid(), 9)


def value(opt, model):
    with opt.center_weights():
        return float(model.w.detach().mean())


def reload(rule):
    """Reload a checkpoint of its own after wrapping, as most scripts do."""
    model, opt = make(rule, 2)
    path = RUN / f"checkpoint-{RANK}.pt"
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
    for n in springline.steps(60):
        step(model, opt, 0.01 if RANK == 0 else 0.02)
        if n == 5:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
        dies_once(RANK == 1 and n == 40)
    if opt.final():
        springline.report(f"{value(opt, model):.0f}")


def pretrained(who):
    """Load pretrained weights after wrapping: all workers, or only the one that is named."""
    model, opt = make("average", 2)
    if who in ("all", str(RANK)):
        model.load_state_dict({"w": torch.full((4,), 100.0)})
    if RANK == 1:
        time.sleep(1.0)
    for _ in springline.steps(20):
        step(model, opt)
    if opt.final():
        springline.report(f"{value(opt, model):.0f}")


def epochs():
    model, opt = make("average", 1)
    for epoch in range(3):
        made = []
        for n in springline.steps(5):
            step(model, opt)
            made.append(n)
            dies_once(epoch == 1 and n == 1 and RANK == 1)
        print("epoch", epoch, made, flush=True)


def never_asks():
    model, opt = make("elastic", 2)
    for n in range(20):
        step(model, opt, 0.01)
        dies_once(RANK == 1 and n == 10)


def accumulate():
    """An optimizer step in every fourth step of the loop."""
    model, opt = make("average", 1)
    for n in springline.steps(20):
        (-model.w.sum() / 4).backward()
        if n % 4 == 3:
            opt.step()
            opt.zero_grad()
        dies_once(n == 11 and RANK == 1)
        print("made", n, flush=True)


def uneven(rule):
    """Rank 0 is much faster than rank 1, evaluates and reports."""
    model, opt = make(rule, 5)
    for _ in springline.steps(43):
        step(model, opt, 0.0 if RANK == 0 else 0.03)
    if opt.final():
        springline.report(f"the center is {value(opt, model):.4f}")


def stale(rule):
    """Evaluate after the loop, without having finished; the period is longer than the loop."""
    model, opt = make(rule, 100)
    for _ in springline.steps(99):
        step(model, opt)
    print("evaluated", value(opt, model), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
