"""Every line of docs/recipes.md, against the twin of what SPEC's table says of it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_training import center, loss_of, near, train, weights

from springline import AsyncDiLoCo, DiLoCo, ElasticAverage, ModelAverage, outer, schedule
from springline.rules.reference import Twin
from springline.torch import optimizer
from springline.torch.outer import TorchOuter

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")
IMPORTS = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
RECIPES = dict(re.findall(r"## (\w+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL))
RULES = {
    "MuLoCo": DiLoCo(workers=2, period=30, outer=outer.Nesterov(0.7, 0.6)),
    "SNOO": DiLoCo(period=20, outer=outer.Nesterov(0.7, 0.9)),
    "Lookahead": DiLoCo(period=5, outer=outer.SGD(0.5)),
    "BMUF": DiLoCo(workers=2, outer=outer.BlockMomentum(1.0, 0.5, nesterov=True)),
    "PostLocalSGD": ModelAverage(workers=2, period=schedule.Warmup(20, then=10)),
    "DOWNPOUR": AsyncDiLoCo(workers=2, outer=outer.SGD(1.0)),
    "DynSGD": AsyncDiLoCo(workers=2, outer=outer.SGD(1.0), staleness="inverse"),
    "EAMSGD": ElasticAverage(workers=2, moving_rate=0.45),
}


def matrices():
    """Muon takes nothing else."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))


def gradient(rank, step, x):
    model = matrices()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in x.items()})
    loss_of(model, step, rank).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def twin_of(rule, inner):
    """A twin with any torch optimizer inside."""
    first = {name: p.numpy() for name, p in weights(matrices()).items()}
    like = TorchOuter(inner, dict.fromkeys(first, inner.param_groups[0]))
    return Twin(rule, first, like, gradient)


def test_all_are_tested():
    assert list(RECIPES) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_recipe_is_what_the_table_says(name, directory, team, together, monkeypatch):
    rule = RULES[name]
    resolve = optimizer.resolve
    if rule.workers > 1:
        monkeypatch.setattr(optimizer, "resolve", lambda _, run, name: resolve(str(directory), run))

    def make():
        names = {"model": matrices()}
        exec(IMPORTS + RECIPES[name], names)
        return names["opt"]

    opts = team(rule.workers, make)
    assert opts[0].worker.rule.settings() == rule.settings()
    twin = twin_of(rule, opts[0].inner)
    # Without rounds the second worker is slower, so that its messages are stale.
    turns = [[0, 1][: rule.workers]] * 65 if rule.rounds else [[0], [0], [1]] * 40

    def step(rank):
        train(opts[rank]._model, opts[rank], [opts[rank].worker.local_step], rank)

    for stepped in twin.run(turns):
        together(*[lambda rank=rank: step(rank) for rank in stepped])
    for opt, right in zip(opts, twin.workers, strict=True):
        near(weights(opt._model), {n: torch.from_numpy(x) for n, x in right.x.items()}, 1e-5)
    near(center(opts[0]), {n: torch.from_numpy(c) for n, c in twin.c.items()}, 1e-5)
    assert opts[0].worker.center.version == twin.global_step > 1
