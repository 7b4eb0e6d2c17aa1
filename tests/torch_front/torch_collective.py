"""A script as a user of `torchrun` writes it: `torch_collective.py OUT MODE`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch_training import INNERS, center, loss_of, network, train, weights, wrap

import springline
from springline.center import CenterError, NonFiniteError
from springline.center.collective import Collective

PERIOD = 3


def make(rule, model=None, **options):
    model = model or network()
    options = {"center": Collective(dist.group.WORLD), "timeout": 60} | options
    return model, wrap(rule, INNERS["sgd"](model.parameters()), PERIOD, model=model, **options)


def result(model, opt):
    """Where it ended."""
    values = {f"x/{n}": t.tolist() for n, t in weights(model).items()}
    values |= {f"c/{n}": t.tolist() for n, t in center(opt).items()}
    return values | {"version": opt.worker.center.version}


def trained(rule, rank, steps, **options):
    """Train, each rank for its own number of steps, and finish."""
    model, opt = make(rule, **options)
    train(model, opt, range(steps), worker=rank)
    opt.finish()
    return result(model, opt)


def nan(rule, rank):
    """Rank 1 has NaN in one round; take the center and go on."""
    model, opt = make(rule)
    seen = ""
    for step in range(2 * PERIOD):
        if rank == 1 and step == PERIOD - 1:
            next(model.parameters()).data.fill_(torch.nan)
        try:
            train(model, opt, [step], worker=rank)
        except NonFiniteError as error:
            seen = str(error)
            opt.take_center()
    opt.finish()
    return result(model, opt) | {"seen": seen}


def refused(rule, rank, model=None, **options):
    try:
        make(rule, model, **options)
    except CenterError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def scenes(rank):
    """All that ends well, one after the other in the same processes."""
    uneven = 5 + 4 * rank
    taller = torch.nn.Linear(4 + rank, 2)
    with_rates = {"moving_rate": 0.2 + 0.1 * rank}
    return {
        "average": trained("average", rank, 12),
        "elastic": trained("elastic", rank, 12),
        "elastic with a penalty": trained("elastic", rank, 12, rho=0.3),
        "average, overlapping": trained("average", rank, 12, overlap=True),
        "elastic, overlapping": trained("elastic", rank, 12, overlap=True),
        "uneven average": trained("average", rank, uneven),
        "uneven elastic": trained("elastic", rank, uneven),
        "nan average": nan("average", rank),
        "nan elastic": nan("elastic", rank),
        "agn": refused("agn", rank),
        "layout": refused("average", rank, taller),
        "settings": refused("elastic", rank, **with_rates),
        "rule": refused("average" if rank else "elastic", rank),
        "batches": batches(rank),
    }


def batches(rank):
    """BatchNorm's averages travel with the center."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    _, opt = make("average", model)
    for _ in range(PERIOD):
        opt.zero_grad()
        model(torch.randn(8, 4) + rank).sum().backward()
        opt.step()
    held = {n: t.tolist() for n, t in opt.worker.center.values().items()}
    opt.finish()
    return {"b": model[1].running_mean.tolist(), "c": held["1.running_mean"]}


def restarted(out, rank):
    """Train to the end, over several restarts; the test kills us in the first."""
    model = network()
    directory = springline.directory()
    group = Collective(dist.group.WORLD, directory / "center", save_every=0)
    _, opt = make("average", model, center=group)
    first = springline.start_step()
    for step in springline.steps(60):
        opt.zero_grad()
        loss_of(model, step, rank).backward()
        opt.step()
        if step == 29 and first == 0:
            opt.worker.center.close()  # a checkpoint that is under way is written
            (out / f"waits-{rank}").write_text(str(os.getpid()))
            while True:  # until it is killed
                time.sleep(0.05)
    opt.finish()
    opt.save_center(out / f"center-{rank}.safetensors")
    return result(model, opt) | {"first": first, "steps": first + opt.worker.local_step}


def main(out, mode):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if mode == "scenes":
        values = scenes(rank)
    elif mode == "restart":
        values = restarted(out, rank)
    else:  # nothing but the default, and no `finish`
        model, opt = make("elastic", center=None)
        train(model, opt, range(7), worker=rank)
        dist.destroy_process_group()
        values = {"kind": type(opt.worker.center).__name__}
    (out / f"rank-{rank}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
