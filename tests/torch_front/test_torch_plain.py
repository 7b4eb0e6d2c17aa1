"""Against plain torch, to the bit: one worker averaging is plain training, AGN is a plain loop."""

import pytest
import torch
from agn_loop import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_training import (
    INNERS,
    RULES,
    center,
    loss_of,
    near,
    network,
    same,
    train,
    weights,
    wrap,
)

from springline.rules import SGD, ElasticAverage
from springline.rules.reference import Twin
from springline.torch import ElasticAverageOptimizer, ModelAverageOptimizer


@pytest.mark.parametrize("inner", INNERS)
def test_one_worker_averaging_is_plain_training(inner):
    plain, model = network(), network()
    train(plain, INNERS[inner](plain.parameters()), range(7))
    opt = wrap("average", INNERS[inner](model.parameters()), model=model)
    train(model, opt, range(7))
    same(weights(model), weights(plain))
    assert opt.worker.center.version == 2
    opt.finish()
    same(center(opt), weights(plain))


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_alone_it_is_plain_training_as_the_center_sees_it(rule):
    """In the middle of a period, too, and with what BatchNorm keeps beside the parameters."""

    def normed():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))

    plain, model = normed(), normed()
    other, inner = (INNERS["adam"](m.parameters()) for m in (plain, model))
    if rule == "average":
        opt = ModelAverageOptimizer(inner, model=model, period=3)
    else:
        opt = ElasticAverageOptimizer(inner, model=model, period=3)
    for m in (plain, model):
        m.load_state_dict({k: v + v.dtype.is_floating_point for k, v in m.state_dict().items()})
    with opt.center_weights():  # before the first step
        same(dict(model.state_dict()), dict(plain.state_dict()))
    for step in range(8):
        train(plain, other, [step])
        train(model, opt, [step])
        same(dict(model.state_dict()), dict(plain.state_dict()))
        if step % 2:
            with opt.center_weights():
                same(dict(model.state_dict()), dict(plain.state_dict()))


def test_alone_lbfgs_is_plain_training():
    plain, model = network(), network()
    other, inner = (torch.optim.LBFGS(m.parameters(), lr=0.5) for m in (plain, model))
    opt = ElasticAverageOptimizer(inner, model=model, period=2)

    def closure(m, o, step):
        def closure():
            o.zero_grad()
            loss = loss_of(m, step)
            loss.backward()
            return loss

        return closure

    for step in range(5):
        other.step(closure(plain, other, step))
        opt.step(closure(model, opt, step))
    same(weights(model), weights(plain))


@pytest.mark.parametrize("inner", INNERS)
def test_agn_is_the_loop_written_out(inner):
    loop, model = Loop(lambda m: INNERS[inner](m.parameters())), network()
    opt = wrap("agn", INNERS[inner](model.parameters()), model=model)
    for step in range(8):
        loop.step()
        train(model, opt, [step])
        same(weights(model), weights(loop.model))
        same(center(opt), weights(loop.center))


OTHERS = {
    "Adadelta": {},
    "Adafactor": {"lr": 0.05},
    "Adamax": {},
    "ASGD": {"lambd": 0.1},
    "Muon": {},
    "NAdam": {},
    "RAdam": {"lr": 0.05},
    "Rprop": {},
}


@pytest.mark.parametrize("name", [name for name in OTHERS if hasattr(torch.optim, name)])
def test_agn_with_the_other_optimizers_of_torch(name):
    def make(model):
        return getattr(torch.optim, name)(model.parameters(), **OTHERS[name])

    def matrices():  # Muon takes nothing else
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))

    loop, model = Loop(make, period=2, model=matrices()), matrices()
    opt = wrap("agn", make(model), 2, model=model)
    for step in range(7):
        loop.step()
        train(model, opt, [step])
        same(weights(model), weights(loop.model))
        same(center(opt), weights(loop.center))


def test_there_are_no_others():
    classes = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    tested = {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LBFGS", "SparseAdam"}
    assert classes <= tested | set(OTHERS)


@settings(max_examples=15, deadline=None)
@given(
    inner=st.sampled_from(sorted(INNERS.keys() - {"lion"})),  # rounding may change a sign
    period=st.integers(1, 5),
    steps=st.integers(1, 12),
    alpha=st.floats(0.05, 1.0),
)
def test_elastic_between_exchanges_is_plain_training(inner, period, steps, alpha):
    plain, model = network(), network()
    plain_opt = INNERS[inner](plain.parameters())
    c = weights(plain)
    opt = wrap("elastic", INNERS[inner](model.parameters()), period, model=model, moving_rate=alpha)
    for step in range(steps):
        train(plain, plain_opt, [step])
        train(model, opt, [step])
        if (step + 1) % period == 0:
            with torch.no_grad():
                for name, p in plain.named_parameters():
                    δ = (p - c[name]) * alpha
                    c[name] += δ
                    p -= δ
        near(weights(model), weights(plain), atol=1e-5)
        near(center(opt), c, atol=1e-5)


def test_the_penalty_follows_the_twin():
    def gradient(worker, step, x):
        model = network()
        model.load_state_dict({name: torch.from_numpy(v) for name, v in x.items()})
        loss_of(model, step, worker).backward()
        return {name: p.grad.numpy() for name, p in model.named_parameters()}

    rule = ElasticAverage(period=2, rho=0.7, moving_rate=0.4)
    first = {name: p.numpy() for name, p in weights(network()).items()}
    twin, model = Twin(rule, first, SGD(0.1), gradient), network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = ElasticAverageOptimizer(inner, model=model, period=2, rho=0.7, moving_rate=0.4)
    for step, _ in enumerate(twin.run([0] * 7)):
        train(model, opt, [step])
        near(weights(model), {n: torch.from_numpy(v) for n, v in twin.workers[0].x.items()})


def grouped(model, make):
    """Two groups with settings of their own: momentum in one, weight decay in the other."""
    first, last = model[0].parameters(), model[2].parameters()
    return make(
        [
            {"params": list(first), "lr": 0.1, "momentum": 0.9},
            {"params": list(last), "lr": 0.02, "weight_decay": 0.3},
        ]
    )


def test_groups_have_settings_of_their_own_in_the_outer_twin_too():
    loop = Loop(lambda m: grouped(m, torch.optim.SGD), period=2)
    model = network()
    opt = wrap("agn", grouped(model, torch.optim.SGD), 2, model=model)
    for step in range(7):
        loop.step()
        train(model, opt, [step])
        same(weights(model), weights(loop.model))
    keys = {
        name: set(state)
        for name, state in opt.state_dict()["springline"]["center"]["outer"].items()
    }
    assert "momentum_buffer" in keys["0.weight"]
    assert "momentum_buffer" not in keys["2.weight"]


@pytest.mark.parametrize("rule", RULES)
def test_groups_in_plain_rules(rule):
    plain, model = network(), network()
    train(plain, grouped(plain, torch.optim.SGD), range(4))
    opt = wrap(rule, grouped(model, torch.optim.SGD), 5, model=model)
    train(model, opt, range(4))
    same(weights(model), weights(plain))
    assert opt.param_groups is opt.inner.param_groups
    assert [g["lr"] for g in opt.param_groups] == [0.1, 0.02]


@pytest.mark.parametrize("rule", RULES)
def test_closures(rule):
    model, other = network(), network()
    opt = wrap(rule, INNERS["adam"](model.parameters()), 2, model=model)
    like = wrap(rule, INNERS["adam"](other.parameters()), 2, model=other)
    for step in range(5):

        def closure(step=step):
            opt.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        expected = loss_of(model, step).item()
        assert opt.step(closure).item() == expected
        train(other, like, [step])
    same(weights(model), weights(other))
    same(center(opt), center(like))


def lbfgs(model, opt, steps):
    for step in steps:

        def closure(step=step):
            opt.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        opt.step(closure)


def test_lbfgs_inside():
    plain, model = network(), network()
    lbfgs(plain, torch.optim.LBFGS(plain.parameters(), max_iter=4), range(3))
    opt = wrap("average", torch.optim.LBFGS(model.parameters(), max_iter=4), 2, model=model)
    lbfgs(model, opt, range(3))
    same(weights(model), weights(plain))
    assert opt.worker.local_step == 3


def test_a_line_search_sees_the_penalty():
    """LBFGS on the loss with the penalty in it, and LBFGS inside with ρ, are the same."""
    plain, model, rho = network(), network(), 0.5
    first = weights(plain)
    make = {"max_iter": 4, "line_search_fn": "strong_wolfe"}
    plain_opt = torch.optim.LBFGS(plain.parameters(), **make)

    def penalized():
        plain_opt.zero_grad()
        loss = loss_of(plain, 0)
        for name, p in plain.named_parameters():
            loss = loss + rho / 2 * (p - first[name]).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        expected = plain_opt.step(penalized)
    opt = wrap("elastic", torch.optim.LBFGS(model.parameters(), **make), 9, model=model, rho=rho)

    def closure():
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(3):
        found = opt.step(closure)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    near(weights(model), weights(plain), atol=1e-5)


def test_agn_refuses_lbfgs_with_a_sentence():
    model = network()
    with pytest.raises(ValueError, match=r"LBFGS cannot be an outer optimizer.*another rule"):
        wrap("agn", torch.optim.LBFGS(model.parameters()), model=model)


@pytest.mark.parametrize("rule", RULES)
def test_gradient_clipping(rule):
    def clip(parameters):
        nn.utils.clip_grad_norm_(parameters, 0.05)

    plain, model = network(), network()
    plain_opt = INNERS["momentum"](plain.parameters())
    opt = wrap(rule, INNERS["momentum"](model.parameters()), 9, model=model)
    for step in range(4):
        for m, o in ((plain, plain_opt), (model, opt)):
            o.zero_grad()
            loss_of(m, step).backward()
            clip(m.parameters())
            o.step()
    same(weights(model), weights(plain))
    if rule == "agn":
        total = torch.cat([t.flatten() for t in opt.state_dict()["springline"]["a"].values()])
        assert total.norm() <= 4 * 0.05 + 1e-6
