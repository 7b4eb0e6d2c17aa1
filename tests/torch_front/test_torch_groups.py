"""`add_param_group` after the optimizer was wrapped."""

import pytest
import torch
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

from springline import LayoutError, LocalCenter
from springline.center import Layout
from springline.rules import ElasticAverage
from springline.torch import DiLoCoOptimizer


def late(model, opt, steps, at):
    """Train the last layer; from a step on, the first too."""
    for step in steps:
        if step == at:
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()


@pytest.mark.parametrize("inner", ["momentum", "adam"])
@pytest.mark.parametrize("at", [0, 4])
def test_averaging_is_plain_training(inner, at):
    plain, model = network(), network()
    late(plain, INNERS[inner](plain[2].parameters()), range(8), at)
    opt = wrap("average", INNERS[inner](model[2].parameters()), model=model)
    late(model, opt, range(8), at)
    same(weights(model), weights(plain))
    assert (opt.worker.local_step, opt.worker.center.version, opt.worker.exchanges) == (8, 2, 2)
    opt.finish()
    assert set(center(opt)) == set(weights(plain))
    same(dict(sorted(center(opt).items())), dict(sorted(weights(plain).items())))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_old_parameters_do_not_notice(rule, overlap):
    """A parameter that nobody uses comes: everything else goes on to the bit."""
    model, other = network(), network()
    options = {"rho": 0.3} if rule == "elastic" else {}
    opt = wrap(rule, INNERS["adam"](model.parameters()), overlap=overlap, **options)
    like = wrap(rule, INNERS["adam"](other.parameters()), overlap=overlap, **options)
    more = nn.Parameter(torch.arange(3.0))
    for step in range(10):
        if step == 4:  # in the middle of a period
            opt.add_param_group({"params": [more]})
        for m, o in ((model, opt), (other, like)):
            train(m, o, [step])
            o.wait()
        same(weights(model), weights(other))
    values, ours = center(opt), center(like)
    assert torch.equal(values.pop("1.0"), more.detach())
    same(values, ours)
    saved, theirs = (o.state_dict()["springline"] for o in (opt, like))
    for key in ("local_step", "exchanged_at", "gradients"):
        assert saved[key] == theirs[key]
    if rule == "agn":
        for name, state in theirs["center"]["outer"].items():
            same(saved["center"]["outer"][name], state)


def test_agn_gives_the_new_group_an_outer_optimizer_of_its_own():
    model = network()
    opt = wrap("agn", torch.optim.SGD(model[2].parameters(), lr=0.1), 2, model=model)
    train(model, opt, range(3))
    new = {"params": list(model[0].parameters()), "lr": 0.2, "momentum": 0.9}
    opt.add_param_group(new)
    before = center(opt)
    gradients = opt.state_dict()["springline"]["a"]
    opt.zero_grad()
    loss_of(model, 3).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    opt.step()
    for name, c in center(opt).items():
        rate = 0.2 if name.startswith("0") else 0.1
        a = grads[name] + gradients.get(name, 0)
        near({name: c}, {name: before[name] - rate * a / 2})
    outer = opt.state_dict()["springline"]["center"]["outer"]
    assert "momentum_buffer" in outer["0.weight"]
    assert "momentum_buffer" not in outer["2.weight"]


def refuses(opt, group):
    groups, layout = len(opt.param_groups), opt.worker.layout
    with pytest.raises(ValueError, match=r"without '0.weight'.*shared.*before it is wrapped"):
        opt.add_param_group(group)
    assert len(opt.param_groups) == groups
    assert opt.worker.layout is layout


def test_a_shared_center_cannot_grow(directory, team):
    def make():
        model = network()
        inner = INNERS["sgd"](model[2].parameters())
        return wrap("elastic", inner, model=model, center=directory)

    (opt,) = team(1, make)
    refuses(opt, {"params": opt._model[0].parameters()})
    train(opt._model, opt, range(3))
    assert opt.worker.center.version == 1


def test_a_center_that_the_user_made_cannot_grow():
    model = network()
    rule = ElasticAverage(period=3)
    values = {n: v.numpy() for n, v in weights(model).items() if n.startswith("2")}
    held = LocalCenter(Layout.of(values), rule, values)
    opt = wrap("elastic", INNERS["sgd"](model[2].parameters()), model=model, center=held)
    refuses(opt, {"params": model[0].parameters()})


def test_a_group_that_was_taken_out_comes_back(directory, team):
    def make():
        model = network()
        groups = [{"params": model[2].parameters()}, {"params": model[0].parameters()}]
        return wrap("agn", INNERS["sgd"](groups), model=model, center=directory)

    (opt,) = team(1, make)
    group = opt.param_groups.pop()
    train(opt._model, opt, range(4))
    opt.add_param_group(group)
    train(opt._model, opt, range(4, 9))
    assert opt.worker.center.version == 3


def test_not_while_the_model_holds_the_center():
    model = network()
    opt = wrap("average", INNERS["sgd"](model[2].parameters()), model=model)
    with opt.center_weights(), pytest.raises(RuntimeError, match="leave `center_weights` first"):
        opt.add_param_group({"params": model[0].parameters()})


def test_a_group_that_is_refused_leaves_everything_as_it_was():
    model, other = network(), network()
    options = {"period": 4, "fragments": [["2.weight"], ["2.bias"]]}
    opt = DiLoCoOptimizer(INNERS["sgd"](model[2].parameters()), model=model, **options)
    like = DiLoCoOptimizer(INNERS["sgd"](other[2].parameters()), model=other, **options)
    with pytest.raises(LayoutError, match=r"leaves out '0.weight'"):
        opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
    train(model, opt, range(8))
    train(other, like, range(8))
    same(weights(model), weights(other))


def test_fragments_name_what_is_tied_and_what_is_frozen():
    """What is frozen now may be trained later."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "mid": nn.Linear(3, 3), "tied": nn.Linear(3, 3)})
    model["tied"].weight = model["a"].weight
    frozen = model["mid"].bias.requires_grad_(False)
    inner = torch.optim.SGD([p for p in model.parameters() if p is not frozen], lr=0.1)
    fragments = [["a", "tied"], ["mid.weight", "mid.bias"]]
    opt = DiLoCoOptimizer(inner, model=model, period=2, fragments=fragments)
    found = {e.name: e.fragment for e in opt.worker.layout.entries}
    assert found == {"a.weight": 0, "a.bias": 0, "tied.bias": 0, "mid.weight": 1}
    opt.add_param_group({"params": [frozen]})
    assert {e.name: e.fragment for e in opt.worker.layout.entries}["mid.bias"] == 1
