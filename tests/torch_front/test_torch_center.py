"""The center in the model, in a file, and after NaN."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch_training import (
    INNERS,
    RULES,
    batch,
    center,
    loss_of,
    near,
    network,
    same,
    train,
    weights,
    wrap,
)

from springline.center import CheckpointError, NonFiniteError


def trained(rule, model, steps=5, **options):
    """An optimizer in the middle of a period: worker and center differ."""
    opt = wrap(rule, INNERS["adam"](model.parameters()), 3, model=model, **options)
    train(model, opt, range(steps))
    return opt


def normed(dtype=torch.float32):
    """A model with buffers: floating-point ones, integers, and one that is not saved."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(dtype)
    model.register_buffer("passing", torch.zeros(3), persistent=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_center_weights(rule, dtype):
    model = normed(dtype)
    opt = trained(rule, model)
    own = {name: t.clone() for name, t in model.state_dict().items()}
    with opt.center_weights():
        for name, c in center(opt).items():
            assert torch.equal(model.state_dict()[name], c.to(dtype)), name
        model(batch(0)[0].to(dtype))  # a forward pass in training mode moves the buffers
    own["1.num_batches_tracked"] += 1
    same(dict(model.state_dict()), own)
    exchanged = torch.equal(center(opt)["0.weight"].to(dtype), own["0.weight"])
    assert exchanged == (rule == "average")  # where it leaves the worker as it is


def test_center_weights_when_the_body_raises():
    model = network()
    opt = trained("elastic", model)
    own = weights(model)
    with pytest.raises(KeyError):
        fail_with_center(opt)
    same(weights(model), own)
    train(model, opt, [5])


def fail_with_center(opt):
    with opt.center_weights():
        raise KeyError


@pytest.mark.parametrize("call", ["step", "take_center"])
def test_no_training_with_the_centers_weights(call):
    opt = trained("average", network())
    words = rf"`{call}` .*call `opt.train\(\)` or leave `center_weights` first"
    with opt.center_weights(), pytest.raises(RuntimeError, match=words):
        getattr(opt, call)()
    opt.eval()
    with pytest.raises(RuntimeError, match=words):
        getattr(opt, call)()
    with pytest.raises(RuntimeError, match=r"`load_state_dict` .*first"):
        opt.load_state_dict(opt.state_dict())
    opt.finish()


def test_center_weights_within_center_weights():
    model = network()
    opt = trained("elastic", model)
    own = weights(model)
    with opt.center_weights():
        with opt.center_weights():
            same(weights(model), center(opt))
        same(weights(model), center(opt))
    same(weights(model), own)
    opt.step()


@pytest.mark.parametrize("rule", RULES)
def test_center_weights_after_the_end(rule):
    model = network()
    opt = trained(rule, model)
    opt.finish()
    with opt.center_weights():
        same(weights(model), center(opt))


@pytest.mark.parametrize("rule", RULES)
def test_save_center(rule, tmp_path):
    model, fresh = normed(), normed()
    opt = trained(rule, model)
    opt.save_center(tmp_path / "center.safetensors")
    assert fresh.load_state_dict(load_file(tmp_path / "center.safetensors"), strict=True)
    with opt.center_weights():
        same(dict(fresh.state_dict()), dict(model.state_dict()))
        model.eval()
        fresh.eval()
        assert torch.equal(fresh(batch(9)[0]), model(batch(9)[0]))
    assert fresh[1].num_batches_tracked == 5
    assert not torch.equal(fresh[1].running_mean, torch.zeros(5))


class Shared(nn.Module):
    """A tied weight, a tied buffer, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.register_buffer("mean", self.norm.running_mean)

    def forward(self, x):
        return self.norm(self.head(self.embed(x)))


@pytest.mark.parametrize("compiled", [False, True])
def test_save_center_under_each_name(tmp_path, compiled):
    model = Shared()
    run = torch.compile(model, backend="eager") if compiled else model
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = wrap("elastic", torch.optim.SGD(trainable, lr=0.1), 2, model=run)
    for _ in range(3):
        opt.zero_grad()
        run(torch.tensor([0, 1, 2])).square().sum().backward()
        opt.step()
    opt.save_center(tmp_path / "center.safetensors")
    saved = load_file(tmp_path / "center.safetensors")
    assert set(saved) == set(model.state_dict())
    assert torch.equal(saved["head.weight"], saved["embed.weight"])
    assert torch.equal(saved["embed.weight"], center(opt)["embed.weight"])
    assert torch.equal(saved["mean"], saved["norm.running_mean"])
    assert torch.equal(saved["mean"], center(opt)["mean"])
    assert torch.equal(saved["frozen"], model.frozen)
    Shared().load_state_dict(saved, strict=True)


def test_save_center_without_a_model(tmp_path):
    model = network()
    opt = wrap("average", torch.optim.SGD(model.named_parameters(), lr=0.1))
    opt.save_center(tmp_path / "center.safetensors")
    network().load_state_dict(load_file(tmp_path / "center.safetensors"))


def test_save_center_where_one_may_not_write(tmp_path):
    opt = trained("average", network())
    with pytest.raises(CheckpointError, match=r"Could not write .*center.safetensors"):
        opt.save_center(tmp_path / "missing" / "center.safetensors")


@pytest.mark.parametrize("inner", ["adam", "adagrad", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_nan_is_raised_with_its_name_and_one_can_go_on(rule, dtype, inner):
    model = network(dtype)
    opt = wrap(rule, INNERS[inner](model.parameters()), 2, model=model)
    train(model, opt, range(2))
    before = center(opt)
    opt.zero_grad()
    loss_of(model, 2).backward()
    model[2].bias.grad[0] = float("nan")
    opt.step()
    with pytest.raises(NonFiniteError, match=r"Parameter '2.bias'|Parameter '0.weight'"):
        train(model, opt, [3])
    assert all(torch.isfinite(c).all() for c in center(opt).values())
    opt.take_center()
    same(weights(model), {name: c.to(dtype) for name, c in center(opt).items()})
    assert all(torch.isfinite(p).all() for p in model.parameters())
    train(model, opt, range(4, 8))
    assert all(torch.isfinite(c).all() for c in center(opt).values())
    assert any(not torch.equal(c, before[name]) for name, c in center(opt).items())


@pytest.mark.parametrize("rule", RULES)
def test_take_center_is_a_fresh_start(rule):
    """From the center, a new optimizer and one that took the center go the same way."""
    model, other = network(), network()
    options = {"rho": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, INNERS["adam"](model.parameters()), 5, model=model, **options)
    train(model, opt, range(6))
    opt.take_center()
    other.load_state_dict(center(opt))
    like = wrap(rule, INNERS["adam"](other.parameters()), 99, model=other, **options)
    train(model, opt, range(6, 9))
    train(other, like, range(6, 9))
    same(weights(model), weights(other))


def test_take_center_leaves_nothing_to_finish():
    opt = trained("agn", network(), 4)
    opt.take_center()
    version = opt.worker.center.version
    opt.finish()
    assert opt.worker.center.version == version


def test_what_was_applied_before_nan_was_found_counts_on_both_sides():
    """The blocks before the bad one are exchanged; `x + c` is conserved, staged or not."""
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.ones(100_000, dtype=torch.float16)),
            "b": nn.Parameter(torch.ones(3, dtype=torch.float16)),
        }
    )
    opt = wrap("elastic", torch.optim.SGD(model.parameters(), lr=0.0), 1, model=model)
    opt.step()
    with torch.no_grad():
        model["a"].fill_(3)
        model["b"][1] = float("inf")
    with pytest.raises(NonFiniteError, match="'b'"):
        opt.step()
    c = center(opt)["a"]
    assert (c != 1).any()
    near({"x": model["a"].float().detach() + c}, {"x": torch.full_like(c, 4)}, atol=2e-3)


def test_the_center_stays_finite_when_the_outer_step_overflows():
    model = nn.ParameterDict({"w": nn.Parameter(torch.full((3,), 3e38))})
    opt = wrap("agn", torch.optim.SGD(model.parameters(), lr=1e20), 1, model=model)
    model["w"].grad = torch.full((3,), -1e19)
    with pytest.raises(NonFiniteError, match="'w'"):
        opt.step()
    assert torch.equal(center(opt)["w"], torch.full((3,), 3e38))
