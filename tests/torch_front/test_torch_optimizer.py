"""It is a torch optimizer: GradScaler, hooks, zero_grad, frozen parameters, bad input."""

import pytest
import torch
from agn_loop import Loop
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_training import (
    INNERS,
    RULES,
    batch,
    center,
    loss_of,
    network,
    same,
    train,
    weights,
    wrap,
)

from springline.torch import ElasticAverageOptimizer
from springline.torch.outer import first_state


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("rule", RULES)
def test_it_is_one(rule):
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    opt = wrap(rule, inner, model=model)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.inner is inner
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert opt.defaults is inner.defaults
    train(model, opt, range(1))
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    opt.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    opt.state = {}
    assert inner.state == {}
    assert type(opt).__name__ in repr(opt)
    assert "period=3" in repr(opt)
    assert "Adam" in repr(opt)


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer.*Received: Parameter"):
        ElasticAverageOptimizer(list(network().parameters()))
    with pytest.raises(ValueError, match=r"`period` must be an integer >= 1.*=0"):
        wrap("average", sgd(network()), 0)
    with pytest.raises(ValueError, match=r"`moving_rate` must be in \(0, 1\].*moving_rate=1.5"):
        wrap("elastic", sgd(network()), moving_rate=1.5)


@pytest.mark.parametrize("rule", RULES)
def test_several_workers_need_a_place_to_meet(rule, monkeypatch):
    """They would train apart, or wait for each other for ever."""
    monkeypatch.setenv("SPRINGLINE_WORKERS", "3")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    with pytest.raises(ValueError, match=r"worker 1 of 3.*no run.*springline run.*`center=`"):
        wrap(rule, sgd(network()))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_grad_scaler_skips_is_no_local_step(rule):
    model, other = network(), network()
    opt = wrap(rule, INNERS["adam"](model.parameters()), 2, model=model)
    like = wrap(rule, INNERS["adam"](other.parameters()), 2, model=other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(6):
        opt.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 2:
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()
        if step != 2:
            train(other, like, [step])
    assert opt.worker.local_step == 5
    assert scaler.get_scale() == 2.0**3
    same(weights(model), weights(other))
    same(center(opt), center(like))


def test_grad_scaler_with_a_fused_inner_optimizer():
    model = network()
    opt = wrap("average", torch.optim.Adam(model.parameters(), fused=True), 2, model=model)
    before, scaler = weights(model), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    next(model.parameters()).grad[0, 0] = float("nan")
    scaler.step(opt)
    scaler.update()
    same(weights(model), before)
    assert opt.worker.local_step == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_hooks_are_called_once(rule, overlap):
    model, calls = network(), []
    opt = wrap(rule, sgd(model), 1, model=model, overlap=overlap)

    def before(optimizer, args, kwargs):
        calls.append(("before", optimizer is opt, args, kwargs, opt.worker.local_step))

    def after(optimizer, args, kwargs):
        calls.append(("after", optimizer is opt, args, kwargs, opt.worker.local_step))

    handles = [opt.register_step_pre_hook(before), opt.register_step_post_hook(after)]
    train(model, opt, [0])
    assert calls == [("before", True, (opt,), {}, 0), ("after", True, (opt,), {}, 1)]
    for handle in handles:
        handle.remove()
    train(model, opt, [1])
    assert len(calls) == 2
    opt.wait()


def test_hooks_see_the_closure_and_may_change_it():
    model = network()
    opt = wrap("elastic", sgd(model), model=model)
    seen = []

    def closure():
        return 1.0

    def before(optimizer, args, kwargs):
        return (optimizer, lambda: args[1]() + 1), kwargs

    opt.register_step_pre_hook(before)
    opt.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(args[1]()))
    assert opt.step(closure) == 2.0
    assert seen == [2.0]


def test_global_hooks_see_one_step():
    model, calls = network(), []
    opt = wrap("average", sgd(model), 1, model=model)
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: calls.append(type(optimizer))
    )
    train(model, opt, [0])
    handle.remove()
    assert calls == [torch.optim.SGD]


def test_hooks_of_the_state_dict():
    model, calls = network(), []
    opt = wrap("elastic", sgd(model), model=model)
    opt.register_state_dict_pre_hook(lambda o: calls.append(("before save", o is opt)))
    opt.register_state_dict_post_hook(lambda o, state: state | {"mine": 1})
    opt.register_load_state_dict_pre_hook(
        lambda o, state: {k: v for k, v in state.items() if k != "mine"}
    )
    opt.register_load_state_dict_post_hook(lambda o: calls.append(("after load", o is opt)))
    state = opt.state_dict()
    assert (state["mine"], "springline" in state) == (1, True)
    opt.load_state_dict(state)
    assert calls == [("before save", True), ("after load", True)]
    assert state["mine"] == 1


@pytest.mark.parametrize("rule", RULES)
def test_frozen_parameters_stay(rule):
    model = network()
    model[0].requires_grad_(False)
    first = weights(model)
    opt = wrap(rule, INNERS["adamw"](model.parameters()), 2, model=model)
    train(model, opt, range(4))
    for name in ("0.weight", "0.bias"):
        assert torch.equal(weights(model)[name], first[name])
        assert torch.equal(center(opt)[name], first[name])
    assert not torch.equal(center(opt)["2.weight"], first["2.weight"])


@pytest.mark.parametrize("rule", RULES)
def test_frozen_parameters_need_not_be_in_the_optimizer(rule):
    model = network()
    model[0].requires_grad_(False)
    opt = wrap(rule, INNERS["adamw"](model[2].parameters()), 2, model=model)
    train(model, opt, range(4))
    assert list(center(opt)) == ["2.weight", "2.bias"]


class Sometimes(nn.Module):
    """The first parameter has a gradient in every step, the second only at step 1 mod 6."""

    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, x, step):
        return (x * (self.always + (self.sometimes if step % 6 == 1 else 0))).mean()


def sometimes_loss(model, step):
    return model(batch(step)[0][:, :3], step) ** 2


@pytest.mark.parametrize("inner", ["momentum", "adamw"])
def test_agn_skips_what_had_no_gradient(inner):
    """In a step: it does not count. In a whole period: the outer optimizer leaves it alone."""
    make = INNERS[inner]
    loop = Loop(lambda m: make(m.parameters()), model=Sometimes(), loss=sometimes_loss)
    model = Sometimes()
    opt = wrap("agn", make(model.parameters()), model=model)
    for step in range(9):
        loop.step()
        opt.zero_grad()
        sometimes_loss(model, step).backward()
        opt.step()
        same(weights(model), weights(loop.model))
        same(center(opt), weights(loop.center))
    taken = opt.state_dict()["springline"]["center"]["outer"]
    counts = {name: int(state["steps_taken"]) for name, state in taken.items()}
    assert counts == {"always": 3, "sometimes": 2}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "agn"])
def test_no_gradient_in_a_step(rule):
    plain, model = Sometimes(), Sometimes()
    plain_opt = INNERS["momentum"](plain.parameters())
    opt = wrap(rule, INNERS["momentum"](model.parameters()), 9, model=model)
    for step in range(4):
        for m, o in ((plain, plain_opt), (model, opt)):
            o.zero_grad()
            sometimes_loss(m, step).backward()
            o.step()
    same(weights(model), weights(plain))


def test_the_first_state_of_adagrad_is_the_one_it_makes_itself():
    (p,) = nn.Linear(3, 2, bias=False).parameters()
    adagrad = torch.optim.Adagrad([p], initial_accumulator_value=0.5)
    same(first_state(adagrad, p), adagrad.state[p])
    assert first_state(torch.optim.Adam([p]), p) == {}
