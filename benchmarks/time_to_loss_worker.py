"""A worker of the time-to-loss benchmark: the demo's training, with nothing else on the clock.

Rank 0 keeps copies of the center (or of the model, if it is alone) while it trains, and evaluates
them afterwards. Started by `time_to_loss.py`, with `examples/` on the path.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from data import tiny_shakespeare
from shakespeare import GPT, batch, evaluate, rate, wrap
from torch import Tensor, nn

import springline
from springline.center import NonFiniteError
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


def train(
    model: GPT, opt: torch.optim.Optimizer, text: Tensor, args: argparse.Namespace
) -> tuple[list[Copy], bool]:
    """Make all steps; return rank 0's copies, and whether all was finite."""
    center = opt.worker.center if isinstance(opt, CenterOptimizer) else None
    every = max(1, args.steps // COPIES)
    copies: list[Copy] = []

    def copy() -> None:
        now = center.values() if center else {n: p.clone() for n, p in model.state_dict().items()}
        copies.append((time.perf_counter() - start, now))

    if isinstance(opt, CenterOptimizer):
        opt.worker.member.barrier()
    start = time.perf_counter()
    try:
        for step in springline.steps(args.steps):
            for group in opt.param_groups:
                group["lr"] = rate(step, args)
            loss = model.loss(batch(text, step, args))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if springline.rank() == 0 and (step + 1) % every == 0 and step + 1 < args.steps:
                copy()
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
    copy()
    return copies, not springline.stopping()


def main() -> None:
    """Train, then evaluate."""
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    cores = os.sched_getaffinity(0)
    if args.threads == 1:
        os.sched_setaffinity(0, {sorted(cores)[springline.rank() % len(cores)]})
    torch.set_num_threads(args.threads)
    text, held_out, characters = texts(args.context, args.part)
    torch.manual_seed(args.seed)
    model = GPT(characters, args.context, args.width, args.layers, args.heads)
    opt: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1
    )
    if args.rule != "alone":
        opt = wrap(opt, model, args)
    model.loss(batch(text, 0, args)).backward()  # first is slow
    opt.zero_grad()
    copies, finite = train(model, opt, text, args)
    if springline.rank() != 0:
        return
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
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
