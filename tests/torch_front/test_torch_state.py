"""`state_dict` and `load_state_dict`."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_resume
from torch_resume import CASES
from torch_training import INNERS, RULES, center, network, same, train, weights, wrap

from springline.center import LayoutError, SettingsError


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Per case, where the first process went on to and where a new one did."""
    folder = tmp_path_factory.mktemp("saved")
    ends = {}
    for number, case in enumerate(CASES):
        parts = torch_resume.make(case)
        torch_resume.train(*parts, range(4))
        torch_resume.save(folder / f"{number}.pt", *parts)
        torch_resume.train(*parts, range(4, 11))
        ends[case] = [torch_resume.result(*parts[:2])]
    here = Path(__file__).parent
    command = [sys.executable, str(here / "torch_resume.py"), str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for number, case in enumerate(CASES):
        ends[case].append(torch.load(folder / f"{number}-resumed.pt", weights_only=True))
    return ends


@pytest.mark.parametrize("case", CASES)
def test_a_new_process_goes_on_to_the_bit(case, resumed):
    went_on, loaded = resumed[case]
    same(loaded, went_on)
    rounds = 4 if "delay" in case else 3
    assert went_on["counts"].tolist() == [11, 0, rounds]


@pytest.mark.parametrize("rule", RULES)
def test_loading_twice_is_loading_once(rule):
    model = network()
    opt = wrap(rule, INNERS["adam"](model.parameters()), 2, model=model)
    train(model, opt, range(3))
    state, x = copy.deepcopy(opt.state_dict()), weights(model)
    ends = []
    for _ in range(2):
        model.load_state_dict(x)
        opt.load_state_dict(copy.deepcopy(state))  # torch shares its tensors with it
        assert opt.worker.center.version == 1
        train(model, opt, range(3, 6))
        ends.append((weights(model), center(opt)))
    same(ends[0][0], ends[1][0])
    same(ends[0][1], ends[1][1])


@pytest.mark.parametrize("rule", RULES)
def test_a_plain_state_of_the_inner_optimizer(rule):
    plain, model = network(), network()
    plain_opt = INNERS["adam"](plain.parameters())
    train(plain, plain_opt, range(3))
    model.load_state_dict(plain.state_dict())
    opt = wrap(rule, INNERS["adam"](model.parameters()), 9, model=model)
    opt.load_state_dict(copy.deepcopy(plain_opt.state_dict()))
    train(plain, plain_opt, range(3, 6))
    train(model, opt, range(3, 6))
    same(weights(model), weights(plain))
    assert opt.worker.local_step == 3


@pytest.mark.parametrize(("steps", "versions"), [(2, 1), (3, 2)])
def test_what_was_left_over_when_it_was_saved_is_sent_at_the_end(steps, versions):
    model, other = network(), network()
    opt = wrap("agn", INNERS["sgd"](model.parameters()), 2, model=model)
    train(model, opt, range(steps))
    resumed = wrap("agn", INNERS["sgd"](other.parameters()), 2, model=other)
    other.load_state_dict(weights(model))
    resumed.load_state_dict(opt.state_dict())
    for each in (opt, resumed):
        each.finish()
        assert each.worker.center.version == versions
    same(center(resumed), center(opt))


def test_the_inner_optimizer_takes_its_part_alone():
    model, other = network(), network()
    opt = wrap("elastic", INNERS["adam"](model.parameters()), model=model)
    train(model, opt, range(2))
    inner = INNERS["adam"](other.parameters())
    inner.load_state_dict(opt.state_dict())
    assert int(next(iter(inner.state.values()))["step"]) == 2


def test_a_state_of_another_model_is_refused():
    model = network()
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), model=model)
    train(model, opt, range(2))
    for other, name in (
        (torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)), "1.weight"),
        (torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)), "0.w"),
    ):
        theirs = wrap("elastic", INNERS["sgd"](other.parameters()), model=other)
        with pytest.raises(LayoutError, match=rf"another model.*'{name}.*Nothing was loaded"):
            opt.load_state_dict(theirs.state_dict())
    assert opt.worker.local_step == 2


def test_a_state_of_another_rule_or_outer_optimizer_is_refused():
    model, other = network(), network()
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), model=model)
    agn = wrap("agn", INNERS["sgd"](other.parameters()), model=other)
    with pytest.raises(SettingsError, match=r"saved with rule='agn'.*has rule='elastic'"):
        opt.load_state_dict(agn.state_dict())
    momentum = wrap("agn", INNERS["momentum"](model.parameters()), model=model)
    with pytest.raises(SettingsError, match=r"saved with outer=.*'momentum': 0.*Nothing"):
        momentum.load_state_dict(agn.state_dict())


def test_a_penalty_that_was_not_saved_starts_at_the_center():
    model = network()
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), 2, model=model)
    train(model, opt, range(3))
    other = network()
    pulled = wrap("elastic", INNERS["sgd"](other.parameters()), 2, model=other, rho=0.5)
    pulled.load_state_dict(opt.state_dict())
    same(pulled.state_dict()["springline"]["copy"], center(opt))


@pytest.mark.parametrize("rule", RULES)
def test_a_state_without_a_center_leaves_the_start_to_the_model(rule, directory, team):
    """Saved in a run, loaded alone: the center is what the model has loaded."""

    def make(**options):
        model = network()
        return wrap(rule, INNERS["sgd"](model.parameters()), 4, model=model, **options)

    first, _ = team(2, lambda: make(center=directory, timeout=30))
    train(first._model, first, range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPRINGLINE_WORKERS", "1")
        patch.setenv("SPRINGLINE_RANK", "0")
        alone = make()
    alone._model.load_state_dict(weights(first._model))
    alone.load_state_dict(first.state_dict())
    with alone.center_weights():
        same(weights(alone._model), weights(first._model))
    train(alone._model, alone, [3])
    assert not alone.worker.exchanges or not torch.equal(
        center(alone)["0.weight"], network()[0].weight
    )


@pytest.mark.parametrize("rule", RULES)
def test_in_a_run_only_the_inner_optimizers_state_is_loaded(rule, directory, team):
    def make():
        model = network()
        options = {"rho": 0.5} if rule == "elastic" else {}
        inner = INNERS["adam"](model.parameters())
        return wrap(rule, inner, 4, model=model, center=directory, timeout=30, **options)

    first, second = team(2, make)
    train(first._model, first, range(3))
    state = first.state_dict()
    assert "center" not in state["springline"]
    before, own = center(second), second.state_dict()["springline"]
    state["param_groups"][0]["lr"] = 0.125
    second.load_state_dict(state)
    same(center(second), before)
    assert second.inner.state_dict()["state"][0]["step"] == 3
    assert second.param_groups[0]["lr"] == 0.125
    assert (second.worker.local_step, second.worker.rank) == (0, 1)
    mine = second.state_dict()["springline"]
    for key in {"a", "copy"} & set(own):
        same(mine[key], own[key])


@pytest.mark.parametrize("other", [{"delay": 1}, {"delay": 0}, {"delay": 0, "overlap": True}])
def test_a_message_under_way_needs_the_delay_it_was_sent_with(other):
    """The center has it, but the worker has not adopted it: it would send it again."""
    model, again = network(), network()
    opt = wrap("diloco", torch.optim.SGD(model.parameters(), 0.1), 4, model=model, delay=2)
    train(model, opt, range(3))
    loaded = wrap("diloco", torch.optim.SGD(again.parameters(), 0.1), 4, model=again, **other)
    with pytest.raises(SettingsError, match=r"saved with delay=2.* has delay="):
        loaded.load_state_dict(opt.state_dict())
    train(model, opt, [3])
    loaded.load_state_dict(opt.state_dict())  # nothing is under way any more
