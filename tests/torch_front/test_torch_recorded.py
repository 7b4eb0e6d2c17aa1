"""What TensorFlow 1.15.5 did, step by step, through the torch optimizers on a shared center."""

import numpy as np
import pytest
import torch
from torch_training import wrap

from recorded import DATA, RECORDED, rows, rule_of, schedule_of, start, twin_of

INNERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, initial_accumulator_value=0.1),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}


class Model(torch.nn.Module):
    """`y = x·w + b`, as it was recorded."""

    def __init__(self):
        super().__init__()
        for name, value in start().items():
            setattr(self, name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, x):
        return x @ self.w + self.b


def make(name, directory):
    """One worker of a recorded run."""
    config, (rule, _) = RECORDED[name]["config"], rule_of(name)
    model = Model()
    options = {"center": directory, "timeout": 30}
    if config["rule"] == "elastic":
        options |= {"moving_rate": rule.alpha, "rho": rule.rho}
    inner = INNERS[config["opt"]](model.parameters(), config["lr"])
    return wrap(config["rule"], inner, rule.period, model=model, **options)


def step(opt, rank):
    """One step, on the recorded data."""
    inputs, targets = (torch.from_numpy(part[opt.worker.local_step]) for part in DATA[rank])
    opt.zero_grad()
    torch.nn.functional.mse_loss(opt._model(inputs), targets).backward()
    opt.step()


def compare(opt, local, center, version):
    for key, p in opt._model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), local[key], rtol=0, atol=2e-5)
        values = opt.worker.center.values()
        np.testing.assert_allclose(values[key], center[key], rtol=0, atol=2e-5)
    assert opt.worker.center.version == version


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded(name, directory, team, together):
    opts = team(RECORDED[name]["config"]["workers"], lambda: make(name, directory))
    twin = twin_of(name)
    first, *others = rows(name)
    for entry in first:
        compare(opts[entry["worker"]], entry["local"], entry["center"], entry["global_step"])
    for ranks, row in zip(twin.run(schedule_of(name)), others, strict=True):
        together(*[lambda rank=rank: step(opts[rank], rank) for rank in ranks])
        for entry in row:
            opt, rank = opts[entry["worker"]], entry["worker"]
            compare(opt, entry["local"], entry["center"], entry["global_step"])
            compare(opt, twin.workers[rank].x, twin.c, twin.global_step)
