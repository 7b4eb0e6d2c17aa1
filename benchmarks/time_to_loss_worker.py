"""A worker of the time-to-loss benchmark: the demo's training, with nothing else on the clock.

Rank 0 keeps copies of the center (or of the model, if it is alone) while it trains, and evaluates
them afterwards. Started by `time_to_loss.py`, with `examples/` on the path.

To tune rules with rounds, one process makes the steps of all workers in lock-step: the losses are
those of a real run, but for rounding, however busy the machine is.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import tiny_shakespeare
from shakespeare import GPT, batch, evaluate, rate, wrap
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import springline
from springline.center import NonFiniteError
from springline.outer import Nesterov
from springline.rules import DiLoCo, ModelAverage
from springline.rules.reference import Optimizer
from springline.torch.optimizer import CenterOptimizer

COPIES = 20  # of a run
LOOK = 0.01  # seconds between two looks whether the others have finished
Copy = tuple[float, Mapping[str, Any]]


def texts(context: int, part: int) -> tuple[Tensor, Tensor, int]:
    """Return the text to train on, held-out windows, and the number of characters."""
    text = tiny_shakespeare()
    code = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([code[character] for character in text])
    tenth = len(codes) // 10
    held_out = codes[-tenth:].unfold(0, context + 1, context)
    return codes[:-tenth], held_out[::part], len(code)


def values_of(model: GPT) -> dict[str, Tensor]:
    """Copy the parameters."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def adamw(model: GPT, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)


def local_step(
    model: GPT, opt: torch.optim.Optimizer, step: int, text: Tensor, args: argparse.Namespace
) -> None:
    """Make one step of one worker."""
    for group in opt.param_groups:
        group["lr"] = rate(step, args)
    loss = model.loss(batch(text, step, args))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def lockstep(model: GPT, text: Tensor, args: argparse.Namespace) -> list[Copy]:
    """Make all steps of all workers, one after another, with the rule's own verbs."""
    rule: ModelAverage | DiLoCo = ModelAverage(period=args.period, workers=args.lockstep)
    if args.rule == "diloco":
        outer = Nesterov(*args.outer)
        rule = DiLoCo(period=args.period, workers=args.lockstep, outer=outer)
    optimizer, none = Optimizer(rule.outer), np.empty(0)
    models = [copy.deepcopy(model) for _ in range(rule.workers)]
    flat = [parameters_to_vector(m.parameters()).detach() for m in models]
    for m, vector in zip(models, flat, strict=True):
        vector_to_parameters(vector, m.parameters())  # they live there from now on
    opts = [adamw(m, args) for m in models]
    xs = [vector.numpy() for vector in flat]
    bases = [x.copy() for x in xs]
    center, every = {"c": xs[0].copy()}, max(1, args.steps // COPIES)
    copies: list[Copy] = []
    start = time.perf_counter()
    for done in range(1, args.steps + 1):
        for rank, (m, opt) in enumerate(zip(models, opts, strict=True)):
            os.environ.update(SPRINGLINE_RANK=str(rank), SPRINGLINE_WORKERS=str(rule.workers))
            local_step(m, opt, done - 1, text, args)
        if done % args.period == 0 or done == args.steps:
            pairs = list(zip(xs, bases, strict=True))
            sent = [rule.contribute(x, none, b, 1, np.empty_like(x)) for x, b in pairs]
            optimizer.step(center, {"c": np.mean(sent, axis=0)}, len(sent))
            for x, base in pairs:
                rule.adopt(x, base, center["c"], none)
        if done == args.steps or done % every == 0:
            vector_to_parameters(torch.from_numpy(center["c"]), model.parameters())
            copies.append((time.perf_counter() - start, values_of(model)))
    return copies


def train(
    model: GPT, opt: torch.optim.Optimizer, text: Tensor, args: argparse.Namespace
) -> tuple[list[Copy], bool]:
    """Make all steps; return rank 0's copies, and whether all was finite."""
    center = opt.worker.center if isinstance(opt, CenterOptimizer) else None
    every = max(1, args.steps // COPIES)
    copies: list[Copy] = []

    def keep() -> None:
        now = center.values() if center else values_of(model)
        copies.append((time.perf_counter() - start, now))

    if isinstance(opt, CenterOptimizer):
        opt.worker.member.barrier()
    start = time.perf_counter()
    try:
        for step in springline.steps(args.steps):
            local_step(model, opt, step, text, args)
            if springline.rank() == 0 and (step + 1) % every == 0 and step + 1 < args.steps:
                keep()
        if isinstance(opt, CenterOptimizer):
            opt.finish()
    except NonFiniteError:
        springline.stop()
    while (
        center
        and springline.rank() == 0
        and not springline.stopping()
        and any(rank.steps < args.steps for rank in center.progress())
    ):
        time.sleep(LOOK)
    keep()
    return copies, not springline.stopping()


def main() -> None:
    """Train, then evaluate."""
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    if args.threads == 1 and not args.lockstep:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[springline.rank() % len(cores)]})
    torch.set_num_threads(args.threads)
    text, held_out, characters = texts(args.context, args.part)
    torch.manual_seed(args.seed)
    model = GPT(characters, args.context, args.width, args.layers, args.heads)
    if args.lockstep > 1:
        copies, finite = lockstep(model, text, args), True
    else:
        opt = adamw(model, args)
        if args.rule not in ("alone", "whole"):
            opt = wrap(opt, model, args)
        model.loss(batch(text, 0, args)).backward()  # first is slow
        opt.zero_grad()
        copies, finite = train(model, opt, text, args)
        if springline.rank() != 0:
            return
    losses: list[float | None] = []
    for _, values in copies:
        model.load_state_dict({name: torch.as_tensor(value) for name, value in values.items()})
        loss = evaluate(model, held_out)
        losses.append(loss if math.isfinite(loss) else None)
    if not finite:
        losses[-1] = None
    curve = {"seconds": [second for second, _ in copies], "losses": losses}
    Path(args.curve).write_text(json.dumps(curve), "utf-8")


if __name__ == "__main__":
    main()
