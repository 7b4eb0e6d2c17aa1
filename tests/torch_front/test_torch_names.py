"""Names, and what happens when a model differs from the center's."""

import pytest
import torch
from torch import nn
from torch_training import INNERS, RULES, center, network, wrap

from springline.center import LayoutError, SettingsError

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_names_from_the_model():
    model = network()
    assert list(center(wrap("average", INNERS["sgd"](model.parameters()), model=model))) == NAMES


def test_names_from_named_parameters():
    model = network()
    assert list(center(wrap("average", INNERS["sgd"](model.named_parameters())))) == NAMES


def test_names_from_groups_of_named_parameters():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    named = dict(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named.items() if name[0] == part]} for part in "ba"
    ]
    opt = wrap("average", INNERS["sgd"](groups))
    assert list(center(opt)) == ["b.weight", "b.bias", "a.weight", "a.bias"]


def test_names_from_nothing():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    assert list(center(wrap("average", INNERS["sgd"](groups)))) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_name_that_stands_for_two_parameters_is_refused():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.named_parameters()}, {"params": second.named_parameters()}]
    with pytest.raises(ValueError, match=r"Two parameters are named 'weight'. Pass `model=`"):
        wrap("average", INNERS["sgd"](groups))


def test_another_models_parameters_are_refused():
    with pytest.raises(ValueError, match=r"shape \(5, 4\) that is not in `model`"):
        wrap("average", INNERS["sgd"](network().parameters()), model=network())


def test_complex_parameters_are_refused_by_name():
    model = nn.ParameterDict({"wave": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(LayoutError, match=r"Parameter 'wave' has dtype complex64"):
        wrap("elastic", INNERS["sgd"](model.parameters()), model=model)


def test_buffers_of_the_model():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), model=model)
    buffers = [e.name for e in opt.worker.layout.entries if e.kind == "buffer"]
    assert buffers == ["1.running_mean", "1.running_var"]
    without = wrap("elastic", INNERS["sgd"](model.parameters()))
    assert not without.worker.buffers


OTHERS = {
    "shape": (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        r"'0.weight' has shape \(5, 4\) in the center, \(3, 4\) in the worker",
    ),
    "missing": (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)),
        r"the center has parameter '2.bias', the worker does not",
    ),
    "extra": (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        r"the worker has parameter '1.weight', the center does not",
    ),
    "dtype": (network(torch.float64), r"'0.weight' has dtype float32 in the center, float64"),
}


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("rule", RULES)
def test_the_first_difference_is_named(rule, how, directory, team):
    models = iter([network(), OTHERS[how][0]])

    def make():
        model = next(models)
        inner = INNERS["sgd"](model.parameters())
        return wrap(rule, inner, model=model, center=directory, timeout=30)

    with pytest.raises(LayoutError, match=OTHERS[how][1]):
        team(2, make)


def test_half_precision_joins_single_precision(directory, team):
    models = iter([network(), network(torch.bfloat16)])

    def make():
        model = next(models)
        return wrap("elastic", INNERS["sgd"](model.parameters()), model=model, center=directory)

    first, second = team(2, make)
    for name, p in second._model.named_parameters():
        assert torch.equal(p.detach(), center(first)[name].bfloat16())


DIFFER = {
    "period": (("elastic", "sgd", {}, 3), ("elastic", "sgd", {}, 4), "period=3.*period=4"),
    "rule": (("elastic", "sgd", {}, 3), ("agn", "sgd", {}, 3), "rule='elastic'.*rule='agn'"),
    "moving rate": (
        ("elastic", "sgd", {"moving_rate": 0.1}, 3),
        ("elastic", "sgd", {"moving_rate": 0.2}, 3),
        "moving_rate=0.1.*moving_rate=0.2",
    ),
    "outer": (("agn", "momentum", {}, 3), ("agn", "adam", {}, 3), "outer=.*SGD.*outer=.*Adam"),
}


@pytest.mark.parametrize("what", DIFFER)
def test_other_settings_are_refused(what, directory, team):
    *cases, message = DIFFER[what]
    cases = iter(cases)

    def make():
        rule, inner, options, period = next(cases)
        model = network()
        made = INNERS[inner](model.parameters())
        return wrap(rule, made, period, model=model, center=directory, **options)

    with pytest.raises(SettingsError, match=message):
        team(2, make)


def test_how_a_step_is_computed_is_each_workers_own_affair(directory, team):
    options = iter([{"foreach": False}, {"foreach": True}, {"fused": True}])

    def make():
        model = network()
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, **next(options))
        return wrap("agn", inner, model=model, center=directory)

    assert len(team(3, make)) == 3
