"""Saved in the middle of a period, resumed in a new process."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch_training import INNERS, center, loss_of, weights, wrap

from springline import outer

CASES = {
    "elastic": ("elastic", "adam", {}),
    "elastic with a penalty": ("elastic", "momentum", {"rho": 0.5, "moving_rate": 0.3}),
    "average": ("average", "adagrad", {}),
    "agn with adam": ("agn", "adam", {}),
    "agn with momentum": ("agn", "nesterov", {}),
    "agn with adagrad": ("agn", "adagrad", {}),
    "elastic, overlapping": ("elastic", "adam", {"overlap": True, "rho": 0.1}),
    "average, overlapping": ("average", "momentum", {"overlap": True}),
    "agn, overlapping": ("agn", "adam", {"overlap": True}),
    "diloco": ("diloco", "adamw", {}),
    "diloco, overlapping": ("diloco", "adamw", {"overlap": True}),
    "diloco, in a delay": ("diloco", "adam", {"delay": 2, "mixing": 0.25}),
    "diloco with adam outside": (
        "diloco",
        "sgd",
        {"outer": lambda ps: torch.optim.Adam(ps, lr=0.05)},
    ),
    "diloco, block momentum": ("diloco", "sgd", {"outer": outer.BlockMomentum(0.9, 0.5)}),
    "diloco, a schedule": ("diloco", "sgd", {"period": lambda step: 3 if step < 6 else 4}),
    "async diloco": ("async_diloco", "adam", {}),
    "async diloco, in a delay": ("async_diloco", "momentum", {"delay": 2}),
    "slowmo": ("slowmo", "momentum", {}),
    "slowmo, overlapping": ("slowmo", "sgd", {"overlap": True}),
}


def make(case):
    """A model with BatchNorm, its optimizer and a scheduler."""
    rule, inner, options = CASES[case]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    opt = wrap(rule, INNERS[inner](model.parameters()), **{"period": 3} | options, model=model)
    return model, opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)


def train(model, opt, scheduler, steps):
    """An exchange in the background is folded in at the end of its step."""
    for step in steps:
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        opt.wait()
        scheduler.step()


def save(path, model, opt, scheduler):
    parts = {"model": model, "opt": opt, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def load(path, model, opt, scheduler):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    scheduler.load_state_dict(saved["scheduler"])


def result(model, opt):
    """All that a trajectory is compared by."""
    outer = opt.state_dict()["springline"]["center"]["outer"]  # waits for what is under way
    counts = opt.worker.local_step, opt.worker.start_step, opt.worker.center.version
    flat = {f"{name}/{key}": t for name, state in outer.items() for key, t in state.items()}
    return {
        "counts": torch.tensor(counts),
        **{f"model/{name}": t for name, t in model.state_dict().items()},
        **{f"x/{name}": t for name, t in weights(model).items()},
        **{f"c/{name}": t for name, t in center(opt).items()},
        **{f"outer/{name}": t for name, t in flat.items()},
    }


def resume(folder):
    """Go on from each saved file and write down where that leads."""
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        parts = make(case)
        load(folder / f"{number}.pt", *parts)
        train(*parts, range(4, 11))
        torch.save(result(*parts[:2]), folder / f"{number}-resumed.pt")


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
