"""Every scheduler of torch: the same learning rates, the same weights; AGN's outer twin follows."""

import inspect

import pytest
import torch
from agn_loop import Loop
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR
from torch_training import loss_of, network, same, train, weights, wrap

SCHEDULERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda k: 0.8),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.1, 3), lr.ExponentialLR(o, 0.7)], [3]
    ),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, 3), lr.ExponentialLR(o, 0.7)]
    ),
    "ReduceLROnPlateau": lambda o: Plateau(o),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.3, total_steps=12),
    "SWALR": lambda o: SWALR(o, 0.2, anneal_epochs=4),
}


class Plateau:
    """A loss that never gets better."""

    def __init__(self, optimizer):
        self.scheduler = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    def step(self):
        self.scheduler.step(1.0)


def make(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def follow(model, opt, scheduler, steps=8):
    """Train, and return the learning rate of every step."""
    rates = []
    for step in range(steps):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    return rates


def test_the_table_is_complete():
    classes = inspect.getmembers(lr, inspect.isclass)
    public = {
        name for name, c in classes if issubclass(c, lr.LRScheduler) and not name.startswith("_")
    }
    assert public - {"LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_as_with_plain_torch(name):
    plain, model = network(), network()
    plain_opt = make(plain)
    expected = follow(plain, plain_opt, SCHEDULERS[name](plain_opt))
    opt = wrap("average", make(model), 2, model=model)
    assert follow(model, opt, SCHEDULERS[name](opt)) == expected
    assert len(set(expected)) > 1
    same(weights(model), weights(plain))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_agns_outer_twin_follows_the_learning_rate(name):
    loop, model = Loop(make, period=2, schedule=SCHEDULERS[name]), network()
    opt = wrap("agn", make(model), 2, model=model)
    scheduler = SCHEDULERS[name](opt)
    for step in range(8):
        loop.step()
        train(model, opt, [step])
        scheduler.step()
        same(weights(model), weights(loop.model))


@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_a_scheduler_made_before_the_optimizer_is_wrapped(rule):
    model, other = network(), network()
    inner = make(model)
    scheduler = SCHEDULERS["OneCycleLR"](inner)
    opt = wrap(rule, inner, 2, model=model)
    follow(model, opt, scheduler)
    like = make(other)
    SCHEDULERS["OneCycleLR"](like)  # AGN's outer settings are those at the time of wrapping
    like_opt = wrap(rule, like, 2, model=other)
    follow(other, like_opt, SCHEDULERS["OneCycleLR"](like_opt))
    same(weights(model), weights(other))


def test_a_learning_rate_that_is_a_tensor():
    def tensor(model):
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.125), momentum=0.9)

    def number(model):
        return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)

    model, other = network(), network()
    opt, like = wrap("agn", tensor(model), 2, model=model), wrap("agn", number(other), 2)
    for m, o in ((model, opt), (other, like)):
        follow(m, o, lr.StepLR(o, 2, 0.5))
    same(weights(model), weights(other))
