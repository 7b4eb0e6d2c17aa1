"""Several optimizers and one center, and what is forwarded to the optimizer inside."""

import copy
import io

import pytest
import torch
from torch import nn
from torch_training import RULES, center, loss_of, network, same, train, weights, wrap

import springline
from springline.torch import ModelAverageOptimizer


def pair(model, **options):
    """Muon for the matrices, AdamW for the rest, as a list."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.02, **options)
    return [muon, torch.optim.AdamW(rest, lr=0.01)]


def joined(rule, model, period=3, **options):
    if rule == "agn":
        options.setdefault("outer", springline.outer.SGD(0.1))
    return wrap(rule, pair(model), period, model=model, **options)


def plain(model, steps, optimizers):
    for step in steps:
        model.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_until_the_first_exchange_it_is_plain_training(rule):
    other, model = network(), network()
    plain(other, range(8), pair(other))
    train(model, joined(rule, model, 9), range(8))
    same(weights(model), weights(other))


def test_averaging_alone_is_plain_training():
    other, model = network(), network()
    plain(other, range(8), pair(other))
    opt = joined("average", model)
    train(model, opt, range(8))
    same(weights(model), weights(other))
    with opt.center_weights():
        same(weights(model), weights(other))


@pytest.mark.parametrize("rule", RULES)
def test_saved_and_loaded_all_go_on(rule):
    model, again = network(), network()
    opt = joined(rule, model)
    train(model, opt, range(5))
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    saved = torch.load(file)
    assert len(saved[1]["param_groups"]) == 2
    assert sorted(saved[1]["state"]) == [0, 1, 2, 3]
    other = joined(rule, again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for m, o in ((model, opt), (again, other)):
        train(m, o, range(5, 9))
    same(weights(again), weights(model))
    same(center(other), center(opt))


def test_groups_and_state_are_those_inside():
    model = network()
    muon, adamw = pair(model)
    opt = ModelAverageOptimizer([muon, adamw], model=model)
    train(model, opt, range(2))
    assert [*map(id, opt.param_groups)] == [id(g) for o in (muon, adamw) for g in o.param_groups]
    assert opt.optimizers == [muon, adamw]
    p = model[0].bias
    assert opt.state[p] is adamw.state[p]
    assert set(opt.state) == {*muon.state, *adamw.state}
    assert len(opt.state) == 4
    opt.state[p] = {"step": 1}
    assert adamw.state[p] == {"step": 1}
    opt.take_center()
    assert not opt.state


def test_schedulers_of_all_or_of_one():
    model = network()
    muon, adamw = pair(model)
    opt = ModelAverageOptimizer([muon, adamw], model=model)
    both = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    one = torch.optim.lr_scheduler.StepLR(adamw, 1, gamma=0.1)
    train(model, opt, range(1))
    both.step()
    one.step()
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.01, 0.0005])


def test_the_scaler_leaves_out_a_step_that_overflows():
    model = network()
    opt = joined("average", model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, factor in enumerate([1.0, float("inf"), 1.0]):
        before = weights(model)
        opt.zero_grad()
        scaler.scale(loss_of(model, step) * factor).backward()
        scaler.step(opt)
        scaler.update()
        moved = any(not torch.equal(p, before[n]) for n, p in weights(model).items())
        assert moved == (factor == 1.0)
    assert opt.worker.local_step == 2


def test_a_closure_is_called_once():
    model, other = network(), network()
    opt, like, calls = joined("average", model), joined("average", other), []
    for step in range(4):

        def closure(step=step):
            calls.append(step)
            opt.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        expected = loss_of(model, step).item()
        assert opt.step(closure).item() == expected
        train(other, like, [step])
    assert calls == [0, 1, 2, 3]
    same(weights(model), weights(other))


def test_what_several_cannot_do_is_refused_with_a_sentence():
    model = network()
    with pytest.raises(ValueError, match="list of optimizers is empty"):
        ModelAverageOptimizer([], model=model)
    with pytest.raises(TypeError, match=r"or a list of them. Received: Linear"):
        ModelAverageOptimizer([*pair(model), model[0]], model=model)
    with pytest.raises(TypeError, match="is wrapped already"):
        ModelAverageOptimizer([joined("average", network())])
    with pytest.raises(ValueError, match=r"of shape \(5, 4\) is in two of the optimizers"):
        ModelAverageOptimizer([*pair(model), torch.optim.SGD(model.parameters())], model=model)
    with pytest.raises(ValueError, match=r"LBFGS calls its closure .* Wrap it alone"):
        ModelAverageOptimizer([pair(model)[0], torch.optim.LBFGS([model[0].bias])])
    with pytest.raises(ValueError, match=r"like several \(Muon, AdamW\). Pass `outer=`"):
        wrap("agn", pair(model), model=model)
    opt = joined("average", model)
    with pytest.raises(ValueError, match="cannot be added to several optimizers"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    state = wrap("average", torch.optim.SGD(network().parameters())).state_dict()
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters.* have \[2, 2\]"):
        opt.inner.load_state_dict(state)
    train(model, opt, range(3))


class Warming(torch.optim.SGD):
    """An optimizer with an attribute, a method and a property of its own."""

    warmth = 3

    def warm(self):
        self.warmth += 1
        return self.warmth

    @property
    def broken(self):
        return self.nothing


def test_unknown_attributes_are_the_inner_optimizers():
    model = network()
    opt = wrap("average", Warming(model.parameters()), model=model)
    assert opt.warmth == 3
    assert opt.warm() == 4
    assert not hasattr(opt, "cold")
    assert not hasattr(opt, "broken")
    opt.inner._secret = 1
    assert not hasattr(opt, "_secret")  # torch's own private marks are the inner one's alone
    with pytest.raises(AttributeError, match=r"'ModelAverageOptimizer' object .* 'cold'"):
        _ = opt.cold
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(opt)


def test_an_error_of_our_own_is_not_hidden():
    class Failing(ModelAverageOptimizer):
        @property
        def warmth(self):
            return self.worker.missing

    opt = Failing(Warming(network().parameters()))
    with pytest.raises(AttributeError, match="'Worker' object has no attribute 'missing'"):
        _ = opt.warmth
