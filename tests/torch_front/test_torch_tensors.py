"""All kinds of parameters: dtypes, memory formats, empty ones, ones that the user replaced."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch_training import RULES, center, loss_of, near, network, same, train, weights, wrap

from springline import NonFiniteError, outer
from springline.torch import DiLoCoOptimizer


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


class Bag(nn.Module):
    """A module of the parameters that it is given; the gradient of each is `2p`."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))

    def loss(self):
        return sum(p.float().square().sum() for p in self.parameters())


def step(model, opt):
    opt.zero_grad()
    model.loss().backward()
    opt.step()


def wide(model):
    """The parameters in the center's dtype."""
    return {
        name: p if p.dtype == torch.float64 else p.float() for name, p in weights(model).items()
    }


def expected(rule, x, c, g):
    """`x` and `c` after an exchange of one worker (α = 0.5, learning rate 0.125)."""
    if rule == "elastic":
        δ = 0.5 * (x - c)
        return x - δ, c + δ
    if "diloco" in rule:  # the first Nesterov step: 0.7 of Δ, and 0.5 of that again
        x = c - 0.7 * 1.5 * (c - x)
    return (c - 0.125 * g, c - 0.125 * g) if rule == "agn" else (x, x)


def check_step(rule, model, opt):
    """One step with an exchange, against the table of the rules."""
    c = center(opt)
    step(model, opt)
    for name, p in model.named_parameters():
        # The gradient is 2p at the x that the step began with, which is the center here.
        first = c[name].to(p.dtype)
        g = 2 * first
        x, after = expected(rule, (first - 0.125 * g).to(c[name].dtype), c[name], g)
        torch.testing.assert_close(center(opt)[name], after.to(c[name].dtype), msg=name)
        torch.testing.assert_close(p.detach(), x.to(p.dtype), msg=name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(rule, dtype):
    model = Bag(w=torch.arange(6.0).reshape(2, 3).to(dtype), b=torch.ones(3, dtype=dtype))
    options = {"moving_rate": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, sgd(model, 0.125), 1, model=model, **options)
    check_step(rule, model, opt)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    assert {v.dtype for v in center(opt).values()} == {kind}
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_a_penalty(dtype):
    """`x − c̃` is taken in float32: c̃ is not rounded first."""
    model = Bag(w=torch.ones(4, dtype=dtype))
    opt = wrap("elastic", sgd(model, 0.0), 9, model=model, rho=0.5)
    step(model, opt)
    opt.worker.local.base.view("float32")[:4] = 1.001  # as after an exchange
    opt.zero_grad()
    model.loss().backward()
    opt.step()
    assert torch.equal(model.w.grad, torch.full((4,), 2 - 0.5 * 0.001).to(dtype))


def test_half_precision_accumulates_in_float32():
    model = Bag(w=torch.ones(1, dtype=torch.bfloat16))
    opt = wrap("agn", sgd(model, 0.0), 999, model=model)
    for _ in range(300):
        step(model, opt)
    # In bfloat16 the sum of ones would stop at 256.
    assert opt.state_dict()["springline"]["a"]["w"].item() == 600


@pytest.mark.parametrize("rule", RULES)
def test_empty_and_zero_dimensional(rule):
    model = Bag(
        nothing=torch.zeros(0, 3),
        scalar=torch.tensor(2.0),
        one=torch.ones(1, 1),
        last=torch.ones(0),
    )
    options = {"moving_rate": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, sgd(model, 0.125), 1, model=model, **options)
    check_step(rule, model, opt)
    assert model.scalar.shape == ()
    assert model.nothing.shape == (0, 3)


@pytest.mark.parametrize("rule", RULES)
def test_memory_formats(rule):
    image = torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last)
    model = Bag(image=image, transposed=torch.arange(6.0).reshape(2, 3).t(), plain=torch.ones(3))
    options = {"moving_rate": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, sgd(model, 0.125), 1, model=model, **options)
    check_step(rule, model, opt)
    assert model.image.is_contiguous(memory_format=torch.channels_last)
    assert not model.transposed.is_contiguous()
    assert model.plain.data_ptr() == opt.worker.parameters["plain"].ctypes.data


@pytest.mark.parametrize("rule", RULES)
def test_a_part_of_a_larger_memory_stays_one(rule):
    flat = torch.arange(6.0)
    model = Bag(first=flat[:2], second=flat[2:])
    options = {"moving_rate": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, sgd(model, 0.125), 1, model=model, **options)
    check_step(rule, model, opt)
    assert torch.equal(flat, torch.cat([model.first, model.second]).detach())


def test_no_copy_on_the_cpu():
    model = network()
    opt = wrap("elastic", sgd(model), model=model)
    train(model, opt, range(4))
    for name, p in model.named_parameters():
        assert p.data_ptr() == opt.worker.parameters[name].ctypes.data


REPLACE = {
    "data": lambda m: [setattr(p, "data", p.data.clone()) for p in m.parameters()],
    "wider": lambda m: m.double(),
    "narrower": lambda m: m.bfloat16(),
    "loaded": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "swapped": lambda m: swapped(m),
}


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("how", REPLACE)
@pytest.mark.parametrize("rule", RULES)
def test_what_the_user_replaced_is_exchanged(rule, how):
    model = network()
    opt = wrap(rule, sgd(model), 2, model=model)
    train(model, opt, range(3))
    REPLACE[how](model)
    before, c = weights(model), center(opt)
    train(model, opt, [3])
    after = {name: p.to(c[name].dtype) for name, p in weights(model).items()}
    for name in c:
        assert not torch.equal(after[name], before[name].to(c[name].dtype))
    if rule == "elastic":
        moved = {n: c[n] + 0.9 / 0.1 * (after[n] - c[n]) for n in c}  # x − δ, c + δ with α = 0.9
        near(center(opt), moved, atol=0.02 if how == "narrower" else 1e-4)
    else:
        near(after, center(opt), atol=0.01 if how == "narrower" else 0)
    train(model, opt, range(4, 6))


def test_a_parameter_that_is_no_longer_in_the_model_is_named():
    model = network()
    opt = wrap("average", sgd(model), 1, model=model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"'0.weight' is no longer in the model.*assign=True"):
        train(model, opt, [0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@pytest.mark.parametrize("rule", RULES)
def test_tied_weights_are_counted_once(rule):
    plain, model = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    x = torch.tensor([0, 3, 3])
    plain_opt, opt = sgd(plain), wrap(rule, sgd(model), 9, model=model)
    for m, o in ((plain, plain_opt), (model, opt)):
        m(x).square().sum().backward()
        o.step()
    same(weights(model), weights(plain))
    assert list(center(opt)) == ["embed.weight"]
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rule", RULES)
def test_compiled_models_have_their_own_names(rule, when):
    plain, model = network(), network()
    train(plain, wrap(rule, sgd(plain), 2, model=plain), range(4))
    run = torch.compile(model, backend="eager")
    if when == "after":
        loss_of(run, 0).backward()
    by_model = wrap(rule, sgd(run), 2, model=run)
    train(run, by_model, range(4))
    same(weights(model), weights(plain))
    assert list(center(by_model)) == list(weights(plain))
    names = wrap("elastic", torch.optim.SGD(run.named_parameters(), lr=0.1))
    assert list(center(names)) == list(weights(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_half_precision_is_no_step(dtype):
    """The center leaves the values that a half-precision parameter has."""
    model = Bag(w=torch.ones(3, dtype=dtype))
    ulp = torch.finfo(dtype).eps
    opt = DiLoCoOptimizer(sgd(model, 0.0), model=model, period=1, outer=outer.SGD(0.25))
    for _ in range(40):
        step(model, opt)
        with torch.no_grad():
            model.w += ulp
    opt.worker.exchange()
    torch.testing.assert_close(center(opt)["w"], torch.full((3,), 1 + 0.25 * 40 * ulp))


def test_evaluating_half_precision_changes_nothing(tmp_path):
    ends = []
    for evaluates in (False, True):
        model = Bag(w=torch.ones(3, dtype=torch.bfloat16))
        opt = DiLoCoOptimizer(sgd(model, 0.0), model=model, period=2, outer=outer.SGD(0.25))
        for _ in range(6):
            step(model, opt)
            with torch.no_grad():
                model.w += 2**-7
            if evaluates:
                with opt.center_weights():
                    opt.save_center(tmp_path / "c")
                assert torch.equal(load_file(tmp_path / "c")["w"], center(opt)["w"])
        ends.append((center(opt)["w"], model.w.detach().clone()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_half_precision_recovers_from_nan():
    model = Bag(w=torch.ones(3, dtype=torch.bfloat16))
    opt = DiLoCoOptimizer(sgd(model, 0.0), model=model, period=1)
    step(model, opt)
    model.w.data[1] = torch.inf
    with pytest.raises(NonFiniteError):
        opt.worker.exchange()
    model.w.data.fill_(1.5)
    opt.worker.exchange()
    assert torch.isfinite(center(opt)["w"]).all()
