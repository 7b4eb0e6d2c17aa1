"""`outer=`: the center's optimizer is the user's choice."""

import copy

import numpy as np
import pytest
import torch

from own_rules import MeanOfPseudoGradients
from springline import SettingsError, Worker, outer
from springline.torch import AGNOptimizer
from springline.torch.outer import TorchOuter


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def train(opt, net, steps=12):
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(8, 3, generator=data)).square().mean().backward()
        opt.step()
    opt.finish()
    return [p.detach().clone() for p in net.parameters()]


def agn_by_hand(net, make_outer, period=3, steps=12):
    """AGN with SGD inside, as its paper has it, on plain tensors."""
    center = copy.deepcopy(net)
    outer_opt = make_outer(list(center.parameters()))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for step in range(steps):
        inner.zero_grad()
        net(torch.randn(8, 3, generator=data)).square().mean().backward()
        for a, p in zip(sums, net.parameters(), strict=True):
            a += p.grad
        inner.step()
        if (step + 1) % period == 0:
            for c, a in zip(center.parameters(), sums, strict=True):
                c.grad = a / period
                a.zero_()
            outer_opt.step()
            net.load_state_dict(center.state_dict())
            sums = [torch.zeros_like(p) for p in net.parameters()]
    return list(net.parameters())


NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
CASES = {
    "sgd": (outer.SGD(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "momentum": (
        outer.Momentum(0.3, 0.8),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8),
    ),
    "nesterov": (outer.Nesterov(0.7, 0.9), lambda p: torch.optim.SGD(p, **NESTEROV)),
    "adam": (None, lambda p: torch.optim.Adam(p, lr=0.05)),
    "adamw": (None, lambda p: torch.optim.AdamW(p, lr=0.05)),
}


@pytest.mark.parametrize("ours", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_the_outer_optimizer_is_the_users(name, ours):
    """Ours in numpy and torch's own do the same, and what the paper says."""
    numpy_one, make = CASES[name]
    net = model()
    expected = agn_by_hand(copy.deepcopy(net), make)
    given = numpy_one if ours and numpy_one else make
    opt = AGNOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, period=3, outer=given)
    for found, wanted in zip(train(opt, net), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    with opt.center_weights():
        for found, wanted in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_parameters_may_have_outer_rates_of_their_own():
    net = model()

    def make(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others}], lr=0.5)

    start = next(net.parameters()).detach().clone()
    opt = AGNOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, period=3, outer=make)
    first, *others = train(opt, net)
    torch.testing.assert_close(first, start, rtol=0, atol=0)
    _, *before = model().parameters()
    assert all(bool((p != q).any()) for p, q in zip(others, before, strict=True))


def test_by_default_it_is_like_the_wrapped_one():
    net = model()
    opt = AGNOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1), model=net)
    assert isinstance(opt.worker.rule.outer, TorchOuter)
    assert opt.worker.rule.outer.kind == "AdamW"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("adam", TypeError, "`outer` must be one of `springline.outer`, or a function"),
        (lambda p: None, TypeError, "Received: NoneType None"),
        (outer.Adam, TypeError, r"as `outer.Adam\(1e-3\)`.* Received: Adam\."),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), TypeError, r"as `lambda ps.*Received: SGD\."),
        (lambda p: torch.optim.SGD(p[:1], lr=0.1), ValueError, "leaves out '0.bias'"),
        (lambda p: torch.optim.LBFGS(p), ValueError, "LBFGS cannot be an outer optimizer"),
    ],
)
def test_what_is_none_is_refused(given, error, words):
    net = model()
    with pytest.raises(error, match=words):
        AGNOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, outer=given)


def test_state_needs_locks():
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="'momentum' must take its steps one at a time"):
        AGNOptimizer(inner, model=net, outer=outer.Momentum(0.1), use_locking=False)
    opt = AGNOptimizer(inner, model=net, outer=outer.SGD(0.1), use_locking=False)
    assert not opt.worker.center.plan.use_locking


def test_rates_of_their_own_hold_in_rounds_too():
    rates = {"v": 1.0, "w": 0.125}
    groups = [{"params": [torch.zeros(2)], "lr": rate} for rate in rates.values()]
    inner = torch.optim.SGD(groups, lr=0.5)
    made = TorchOuter(inner, dict(zip(rates, inner.param_groups, strict=True)))
    values = {name: np.zeros(2, np.float32) for name in rates}
    worker = Worker(values, MeanOfPseudoGradients(period=1, outer=made))
    for x in worker.parameters.values():
        x -= 1
    worker.step()
    for name, c in worker.center.values().items():
        np.testing.assert_array_equal(c, -rates[name])


@pytest.mark.parametrize(
    "make",
    [outer.SGD, lambda lr: lambda ps: torch.optim.SGD(ps, lr=lr)],
    ids=["numpy", "torch"],
)
def test_a_center_refuses_another_outer_learning_rate(make):
    """It is the outer optimizer's own; by default the wrapped one's travels with the messages."""
    net = model()

    def rule(given, lr=0.1):
        inner = torch.optim.SGD(net.parameters(), lr=lr)
        opt = AGNOptimizer(inner, model=net, outer=given)
        return opt.worker.rule, opt.worker.center

    _, center = rule(make(0.5))
    center.check_join(0, rule(make(0.5), lr=0.3)[0], None)
    with pytest.raises(SettingsError, match=r"'learning_rate': 0.5.*'learning_rate': 0.25"):
        center.check_join(0, rule(make(0.25))[0], None)
    with pytest.raises(SettingsError, match=r"outer=.*'learning_rate': 0.5.*outer=\{"):
        center.check_join(0, rule(None)[0], None)
    rule(None, lr=0.1)[1].check_join(0, rule(None, lr=0.3)[0], None)
