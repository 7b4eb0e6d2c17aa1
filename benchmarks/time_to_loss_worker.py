"""A worker of the time-to-loss benchmark: the demo's training, with nothing else on the clock.

Rank 0 keeps copies of the center (or of the model, if it is alone) while it trains, and evaluates
them afterwards. Started by `time_to_loss.py`, with `examples/` on the path.

One process can make the steps of all workers in lock-step, on a center of its own: the losses of
rules with rounds are those of a real run, but for rounding, however busy the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from data import tiny_shakespeare
from shakespeare import GPT, batch, evaluate, rate, wrap
from torch import Tensor, nn

import springline
from springline import AsyncDiLoCo, DiLoCo, ElasticAverage, LocalCenter, ModelAverage, Worker
from springline.center import Layout, NonFiniteError
from springline.outer import DelayedNesterov, Nesterov
from springline.rules import Rule
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
    settings: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}
    return torch.optim.AdamW(model.parameters(), lr=args.lr, **settings)


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


def rule_of(args: argparse.Namespace) -> Rule:
    """Return the rule of workers in lock-step: the demo's own, or one that it does not have."""
    made: dict[str, Any] = {"period": args.period, "workers": args.lockstep}
    if args.rule == "elastic":
        return ElasticAverage(moving_rate=args.moving_rate, **made)
    if args.rule == "diloco":
        return DiLoCo(outer=Nesterov(*args.outer), **made)
    if args.rule == "async_diloco":
        return AsyncDiLoCo(outer=DelayedNesterov(*args.outer), **made)
    if args.rule == "async_nesterov":  # each push is a step of its own, a p-th as long
        rate, momentum = args.outer
        return AsyncDiLoCo(outer=Nesterov(rate / args.lockstep, momentum), **made)
    return ModelAverage(**made)


def lockstep(model: GPT, text: Tensor, args: argparse.Namespace) -> list[Copy]:
    """Make all steps of all workers, one after another; those of a round exchange at once."""
    rule, first = rule_of(args), {n: p.detach().numpy() for n, p in model.named_parameters()}
    center = LocalCenter(Layout.of(first), rule, first)
    ranks = range(rule.workers)
    workers = [Worker(first, rule, center, rank, synchronous=False) for rank in ranks]
    models = [copy.deepcopy(model) for _ in ranks]
    for worker, m in zip(workers, models, strict=True):
        for name, p in m.named_parameters():
            p.data = torch.from_numpy(worker.parameters[name])  # they live there from now on
    opts = [adamw(m, args) for m in models]
    every, start = max(1, args.steps // COPIES), time.perf_counter()
    copies: list[Copy] = []
    os.environ["SPRINGLINE_WORKERS"] = str(rule.workers)
    with contextlib.closing(center), ThreadPoolExecutor(rule.workers) as pool:
        each = pool.map if rule.rounds else map
        for worker in workers:
            worker.begin()
        for done in range(1, args.steps + 1):
            due = []
            for worker, m, opt in zip(workers, models, opts, strict=True):
                os.environ["SPRINGLINE_RANK"] = str(worker.rank)
                local_step(m, opt, done - 1, text, args)
                if worker.advance() or done == args.steps:
                    due.append(worker)
            list(each(Worker.exchange, due))
            if done == args.steps or done % every == 0:
                copies.append((time.perf_counter() - start, center.values()))
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
