"""A small model, its data, and the optimizers by the name of their rule."""

import os

import torch
from torch import nn

from springline.torch import (
    AGNOptimizer,
    AsyncDiLoCoOptimizer,
    DiLoCoOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
    SlowMoOptimizer,
)

OPTIMIZERS = {
    "elastic": ElasticAverageOptimizer,
    "average": ModelAverageOptimizer,
    "agn": AGNOptimizer,
    "diloco": DiLoCoOptimizer,
    "async_diloco": AsyncDiLoCoOptimizer,
    "slowmo": SlowMoOptimizer,
}
RULES = sorted(OPTIMIZERS)


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum: an optimizer that torch does not have."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (first, second), rate = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - rate * group["weight_decay"])
                p.sub_(rate * torch.sign(first * m + (1 - first) * p.grad))
                m.mul_(second).add_(p.grad, alpha=1 - second)
        return loss


INNERS = {
    "sgd": lambda p, **k: torch.optim.SGD(p, **({"lr": 0.05} | k)),
    "momentum": lambda p, **k: torch.optim.SGD(p, **({"lr": 0.05, "momentum": 0.9} | k)),
    "nesterov": lambda p, **k: torch.optim.SGD(
        p, **({"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01} | k)
    ),
    "adam": lambda p, **k: torch.optim.Adam(p, **({"lr": 0.01, "amsgrad": True} | k)),
    "adamw": lambda p, **k: torch.optim.AdamW(p, **({"lr": 0.01} | k)),
    "adagrad": lambda p, **k: torch.optim.Adagrad(
        p, **({"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2} | k)
    ),
    "rmsprop": lambda p, **k: torch.optim.RMSprop(
        p, **({"lr": 0.01, "momentum": 0.5, "centered": True} | k)
    ),
    "lion": lambda p, **k: Lion(p, **({"lr": 0.01} | k)),
}


def wrap(rule, inner, period=3, **options):
    """The optimizer of a rule around an inner one; elastic averaging pulls, alone, too."""
    one = os.environ.get("SPRINGLINE_WORKERS", os.environ.get("WORLD_SIZE", "1")) == "1"
    if rule == "elastic" and one and "center" not in options:
        options.setdefault("moving_rate", 0.9)
    return OPTIMIZERS[rule](inner, period=period, **options)


def network(dtype=torch.float32):
    """A small model, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batch(step, worker=0):
    """The data of one step of one worker."""
    g = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)


def loss_of(model, step, worker=0):
    """The loss at one step of one worker."""
    x, y = batch(step, worker)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype)).float(), y)


def train(model, opt, steps, worker=0):
    """Plain training, as without springline."""
    for step in steps:
        opt.zero_grad()
        loss_of(model, step, worker).backward()
        opt.step()


def weights(model):
    """A copy of the parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def center(opt):
    """A copy of the center, by name."""
    return {name: torch.from_numpy(v) for name, v in opt.worker.center.values().items()}


def same(left, right):
    """The same tensors, to the bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def near(left, right, atol=1e-6):
    """The same tensors, but for rounding."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=atol, msg=name)
