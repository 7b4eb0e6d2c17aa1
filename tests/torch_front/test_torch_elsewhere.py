"""Parameters that cannot be views of the flat buffer, as on another device: all goes by copies."""

import copy

import pytest
import torch
from torch_training import INNERS, RULES, center, network, same, train, weights, wrap

from springline.torch import binding, optimizer
from springline.torch.binding import Mirror


class Far(Mirror):
    """Every tensor of a far parameter a copy of its part of the flat buffer."""

    def __init__(self, layout, buffer, parameters):
        super().__init__(layout, buffer, parameters)
        for p in parameters.values():
            if id(p) in self.tensors and is_far(p):
                flat = self.tensors[id(p)]
                self.tensors[id(p)] = flat.clone()
                self._copies.append((flat, self.tensors[id(p)]))


def is_far(p):
    return getattr(p, "far", False)


@pytest.fixture
def make(monkeypatch):
    """`make(rule, far=True)`: a model and its optimizer, by copies or as on the CPU."""
    can_be_view = binding._can_be_view
    monkeypatch.setattr(
        binding, "_can_be_view", lambda p, view: not is_far(p) and can_be_view(p, view)
    )
    monkeypatch.setattr(optimizer, "Mirror", Far)

    def make(rule, far=True, **options):
        model = network()
        for p in model.parameters():
            p.far = far
        if rule == "elastic":
            options = {"rho": 0.5} | options
        return model, wrap(rule, INNERS["adam"](model.parameters()), 3, model=model, **options)

    return make


def both(make, rule, **options):
    return make(rule, far=False, **options), make(rule, **options)


def agree(near, far):
    same(weights(near[0]), weights(far[0]))
    same(center(near[1]), center(far[1]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_same_trajectory(rule, overlap, make):
    near, far = both(make, rule, overlap=overlap)
    for step in range(8):
        for model, opt in (near, far):
            train(model, opt, [step])
            opt.wait()
        agree(near, far)
    for _, opt in (near, far):
        opt.finish()
    agree(near, far)
    assert far[1].binding._bound == {}


@pytest.mark.parametrize("rule", RULES)
def test_saved_and_loaded(rule, make):
    near, far = both(make, rule)
    for model, opt in (near, far):
        train(model, opt, range(5))
    state = copy.deepcopy(far[1].state_dict())
    for key in {"a", "copy"} & set(state["springline"]):
        same(state["springline"][key], near[1].state_dict()["springline"][key])
    other_model, other = make(rule)
    other_model.load_state_dict(far[0].state_dict())
    other.load_state_dict(state)
    for model, opt in (near, (other_model, other)):
        train(model, opt, range(5, 8))
    agree(near, (other_model, other))


@pytest.mark.parametrize("rule", RULES)
def test_the_center_goes_in_and_out(rule, make):
    near, far = both(make, rule)
    for model, opt in (near, far):
        train(model, opt, range(5))
        own = weights(model)
        with opt.center_weights():
            same(weights(model), center(opt))
        same(weights(model), own)
        opt.take_center()
        same(weights(model), center(opt))
        train(model, opt, range(5, 7))
    agree(near, far)


def test_a_mirror_on_the_cpu_is_the_buffer_itself():
    model = network()
    opt = wrap("agn", INNERS["sgd"](model.parameters()), model=model)
    train(model, opt, [0])
    views = opt.worker.layout.views(opt.worker.local.a)
    for name, p in model.named_parameters():
        tensor = opt._mirror.tensors[id(p)]
        assert tensor.data_ptr() == views[name].ctypes.data
        assert torch.equal(tensor, p.grad)
