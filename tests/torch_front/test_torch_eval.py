"""`opt.eval()` and `opt.train()`: the center in the model, as accelerate does it, and others."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree
from torch_training import INNERS, RULES, center, network, same, train, weights, wrap

DTYPES = [torch.float32, torch.bfloat16]


def trained(rule, model, steps=5, **options):
    opt = wrap(rule, INNERS["adam"](model.parameters()), model=model, **options)
    train(model, opt, range(steps))
    return opt


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_eval_shows_the_center_and_train_takes_it_out(rule, dtype):
    model, like = network(dtype), network(dtype)
    opt, undisturbed = trained(rule, model), trained(rule, like)
    own = weights(model)
    for _ in range(2):  # both are idempotent
        opt.eval()
        shown = {name: c.to(dtype) for name, c in center(opt).items()}
        same(weights(model), shown)
    for _ in range(2):
        opt.train()
        same(weights(model), own)
    undisturbed.eval()  # alone, averaging brings the center up to date first
    undisturbed.train()
    train(model, opt, range(5, 9))
    train(like, undisturbed, range(5, 9))
    same(weights(model), weights(like))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_follows_eval_and_train(rule):
    model = network()
    opt = trained(rule, model)
    opt.eval()
    with opt.center_weights():  # it is there already
        same(weights(model), center(opt))
    same(weights(model), center(opt))  # and stays
    before = center(opt)
    with pytest.raises(RuntimeError, match=r"holds the center, and `step` .*`opt.train\(\)`"):
        opt.step()
    same(center(opt), before)
    opt.train()
    opt.step()


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_of_a_model_that_holds_the_center(rule):
    """Saved after `eval`, as trainers do: loaded, the worker goes on with its own weights."""
    model, again = network(), network()
    opt = trained(rule, model)
    opt.eval()
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    other = wrap(rule, INNERS["adam"](again.parameters()), model=again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    opt.train()
    same(weights(again), weights(model))
    same(center(other), center(opt))
    for m, o in ((model, opt), (again, other)):
        train(m, o, range(5, 9))
    same(weights(again), weights(model))


@pytest.mark.parametrize("rule", RULES)
def test_finish_after_eval_shows_the_center_that_it_leaves(rule):
    model, like = network(), network()
    opt, plain = trained(rule, model), trained(rule, like)
    opt.eval()
    opt.finish()
    plain.finish()
    same(weights(model), center(plain))
    opt.train()
    same(weights(model), weights(like))


def test_save_center_writes_what_is_evaluated(tmp_path):
    model = network()
    opt = trained("elastic", model)
    opt.eval()
    opt.save_center(tmp_path / "center.safetensors")
    same(load_file(tmp_path / "center.safetensors"), dict(model.state_dict()))


def test_accelerate_forwards_them():
    from accelerate import Accelerator

    model = network()
    opt = trained("elastic", model)
    own, prepared = weights(model), Accelerator(cpu=True).prepare_optimizer(opt)
    prepared.eval()
    same(weights(model), center(opt))
    prepared.train()
    same(weights(model), own)


def test_around_schedule_free_it_is_the_center_that_is_evaluated():
    """Its own `eval` and `train` are called too, so training is as without the wrapper."""
    plain, model = network(), network()
    alone = AdamWScheduleFree(plain.parameters(), lr=0.01)
    opt = wrap("average", AdamWScheduleFree(model.parameters(), lr=0.01), model=model)
    for begin in (0, 5, 10):
        for m, o in ((plain, alone), (model, opt)):
            o.train()
            train(m, o, range(begin, begin + 5))
        same(weights(model), weights(plain))
        alone.eval()
        opt.eval()
        same(weights(model), center(opt))
        assert not opt.param_groups[0]["train_mode"]
    with pytest.raises(RuntimeError, match="holds the center"):
        opt.step()
