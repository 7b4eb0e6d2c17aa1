"""A worker of the comparison over links and with faults; or, on Ray, who watches the center.

    python trainer.py train ARGUMENTS
    python trainer.py watch ARGUMENTS

Workers write how far they have come and the bytes that their host has sent and received, with a
clock that all hosts share. Copies of what would be saved are kept, and evaluated afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from links_pace import Pace, wait
from shakespeare import GPT, batch, evaluate, rate
from systems import SYSTEMS, WRAPS
from time_to_loss_worker import adamw, texts
from torch import Tensor, nn

import springline
from springline.errors import CenterError

LOOK = 0.02  # seconds between two looks at a file
Copies = list[tuple[float, Mapping[str, Any]]]


def on_the_wire() -> int:
    """Return the bytes that this host has sent and received so far."""
    for line in Path("/proc/net/dev").read_text("ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            values = figures.split()
            return int(values[0]) + int(values[8])
    return 0  # it has no link: it trains alone


def wait_for(*paths: Path) -> None:
    """Wait until there are these files."""
    while not all(path.exists() for path in paths):
        time.sleep(LOOK)


def slow_down(model: GPT, pace: Pace) -> None:
    """Let every block wait until the step is as far as it would be on a larger model."""
    layers = len(model.blocks)
    for number, block in enumerate(model.blocks, 1):

        def waiting(_: nn.Module, __: object, out: Tensor, number: int = number) -> Tensor:
            return wait(out, pace, number, layers)

        block.register_forward_hook(waiting)


def train(args: argparse.Namespace) -> Copies:
    """Make this worker's steps; return copies of what would be saved, if it is this one's to."""
    folder, rank = Path(args.folder), springline.rank()
    text, _, characters = texts(args.context, args.part)
    torch.manual_seed(args.seed)
    model = GPT(characters, args.context, args.width, args.layers, args.heads)
    model.loss(batch(text, 0, args)).backward()  # the first is slow
    model.zero_grad()
    slowed = args.straggler and rank == args.workers - 1
    pace = Pace(args.seconds * (args.straggler if slowed else 1))
    slow_down(model, pace)
    wrapped = WRAPS[args.system](model, adamw(model, args), args)
    keeps = rank == 0 and SYSTEMS[args.system].meets != "ray"
    copies: Copies = []
    (folder / f"ready-{rank}").touch()
    wait_for(*(folder / f"ready-{k}" for k in range(args.workers)))
    if SYSTEMS[args.system].meets == "ray":
        wait_for(folder / "watching")
    with (folder / f"trace-{rank}.jsonl").open("a") as trace:

        def note(done: int) -> None:
            now = time.monotonic()
            print(json.dumps([now, done, on_the_wire()]), file=trace, flush=True)
            if keeps and done:
                copies.append((now, wrapped.saved()))

        note(0)
        for step in wrapped.steps():
            pace.begin()
            for group in wrapped.opt.param_groups:
                group["lr"] = rate(step, args)
            loss = wrapped.loss(batch(text, step, args))
            wrapped.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.opt.step()
            wrapped.after(step + 1)
            if step + 1 == args.stop_at:
                break
            if (step + 1) % args.every == 0 and step + 1 < args.steps:
                note(step + 1)
            if step + 1 >= args.steps // 3 and not (folder / f"third-{rank}").exists():
                (folder / f"third-{rank}").touch()
        if args.stop_at:  # only the steps are timed
            note(step + 1)
        wrapped.end()
        if not args.stop_at:
            note(step + 1)
    return copies


def watch(args: argparse.Namespace) -> Copies:
    """Read a run's center now and then until the run is over, on the host where the center is."""
    from springline.center.ray import RayCenter

    folder, copies = Path(args.folder), Copies()
    wait_for(*(folder / f"ready-{k}" for k in range(args.workers)))
    names = (os.environ[f"SPRINGLINE_{name}"] for name in ("CENTER", "ADDRESS", "TOKEN"))
    center = RayCenter.open(*names)
    (folder / "watching").touch()
    while not (folder / "over").exists():
        with contextlib.suppress(CenterError):  # it is late; the last copy must come
            copies.append((time.monotonic(), center.values()))
        time.sleep(args.every * args.seconds)
    copies.append((time.monotonic(), center.values()))
    center.retire()
    return copies


def curve(copies: Copies, args: argparse.Namespace) -> list[tuple[float, float | None]]:
    """Evaluate the copies."""
    _, held_out, characters = texts(args.context, args.part)
    model = GPT(characters, args.context, args.width, args.layers, args.heads)
    found: list[tuple[float, float | None]] = []
    for second, values in copies:
        model.load_state_dict({name: torch.as_tensor(value) for name, value in values.items()})
        loss = evaluate(model, held_out)
        found.append((second, loss if math.isfinite(loss) else None))
    return found


def main(what: str, given: str) -> None:
    """Train or watch, then evaluate."""
    args = argparse.Namespace(**json.loads(given))
    torch.set_num_threads(1)
    copies = train(args) if what == "train" else watch(args)
    if copies:
        losses = json.dumps(curve(copies, args))
        (Path(args.folder) / "curve.json").write_text(losses, "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
