"""What TensorFlow 1.15.5 and torchft did, step by step, through the torch optimizers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_torchft import Model
from torch_training import wrap

from marks import slow
from recorded import DATA, RECORDED, TORCHFT, adoptions, rows, rule_of, schedule_of, twin_of

ALL_AT_ONCE = "streaming-2-delay-1-mixing-half"  # fragments, a delay and mixing
INNERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, initial_accumulator_value=0.1),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}


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


@pytest.mark.parametrize("name", [ALL_AT_ONCE, *slow(*sorted(set(TORCHFT) - {ALL_AT_ONCE}))])
def test_what_torchft_recorded(name, tmp_path):
    """With torch's optimizers inside and outside, in a run of two processes."""
    script = Path(__file__).with_name("torch_torchft.py")
    command = [sys.executable, "-m", "springline.cli", "run", "--workers", "2", "--no-live"]
    done = subprocess.run(
        [*command, "--run", tmp_path / "run", script, name, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for k, row in enumerate(TORCHFT[name]["rows"]):
        for (x, _), right in zip((mine[k] for mine in found), row, strict=False):
            for key, value in x.items():
                np.testing.assert_allclose(value, right[key], rtol=0, atol=2e-5)
        if k in adoptions(name):
            for key, c in found[0][k][1].items():
                np.testing.assert_allclose(c, row[2][key], rtol=0, atol=2e-5)
