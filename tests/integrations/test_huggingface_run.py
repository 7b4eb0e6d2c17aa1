"""Hugging Face's Trainer on two workers: real processes, real kills."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_script import Rows, trainer
from processes import LAUNCH, TORCHRUN, python
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from springline.center.checkpoint import describe, newest
from springline.monitor.metrics import read_metrics
from springline.run import PROCESS_GROUP

SCRIPT = Path(__file__).with_name("hf_script.py")
BATCH, EPOCH = 4, 8  # rows of a batch, batches of a worker's epoch


def found_by(out, rank):
    return json.loads((out / f"rank-{rank}.json").read_text())


def finite(values):
    return values[np.isfinite(values)]


def loss_of(saved, folder):
    model = GPT2LMHeadModel.from_pretrained(saved)
    return trainer(folder, model=model).evaluate()["eval_loss"]


def test_two_workers_of_which_one_is_killed(tmp_path, directory, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    evaluating = {"eval_strategy": "steps", "eval_steps": 6}
    changes = json.dumps(saving | evaluating)
    run = [*LAUNCH, "--run", directory, SCRIPT, "out", "--changes", changes]
    with monkeypatch.context() as pod:  # as of Kubeflow: its group is the launcher's alone
        for name in PROCESS_GROUP:
            pod.setenv(name, "127.0.0.1" if name == "MASTER_ADDR" else "1")
        output = python(tmp_path, *run, "--resume", "--kill", 1, 8)
    out, checkpoints = tmp_path / "out", tmp_path / "out" / "checkpoints"
    first, second = found_by(out, 0), found_by(out, 1)

    # Its own last checkpoint that is complete; steps, schedule and data are those of its rank.
    said = r"rank 1 goes on at step 6 with the optimizer's state of \S+/worker-1/checkpoint-6 "
    assert re.search(said + r"and the center's values \(version \d+\), as it should", output)
    assert second["moments"] == [6]
    assert (first["began"], second["began"]) == (0, 6)
    assert first["ended"] == second["ended"] == 12
    assert second["rates"] == first["rates"][6:]
    steps = describe(newest(directory / "center" / "checkpoint.safetensors")).steps
    assert steps == [12, 12]

    # Each has its part of the data, another one in each epoch.
    rows, others = np.array(first["rows"][: 12 * BATCH]), np.array(second["rows"][: 6 * BATCH])
    left = EPOCH - 6
    assert set(rows[: EPOCH * BATCH]).isdisjoint(others[: left * BATCH])
    assert set(rows[EPOCH * BATCH :]).isdisjoint(others[left * BATCH :])
    assert len(set(rows[: EPOCH * BATCH])) == EPOCH * BATCH

    # What is evaluated and saved is the center, which all have in common.
    center = load_file(directory / "center.safetensors")
    for saved in (out / "final", checkpoints / "checkpoint-12"):
        values = load_file(saved / "model.safetensors")
        assert all(torch.equal(values[name], center[name]) for name in values)
    assert first["eval_loss"] == second["eval_loss"]
    assert first["eval_loss"] == loss_of(out / "final", tmp_path / "again")

    # One writer.
    assert (first["main"], second["main"]) == (True, False)
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"checkpoint-9", "checkpoint-12", "worker-1"}
    own = {path.name for path in (checkpoints / "worker-1").iterdir()}
    assert own >= {"checkpoint-12"}
    assert "resume" not in own

    # The run's screen.
    metrics = read_metrics(directory)
    assert [len(finite(metrics[rank].values["loss"])) for rank in (0, 1)] == [6, 6]
    assert len(finite(metrics[0].values["val_loss"])) == 3
    assert finite(metrics[0].values["val_loss"])[-1] == first["eval_loss"]
    assert "val_loss" not in metrics[1].values
    assert (directory / "total").read_text() == "12\n"
    assert first["wrapped"] == second["wrapped"] == "GPT2LMHeadModel"


@pytest.mark.slow
def test_a_worker_without_checkpoints_goes_on_in_the_middle_of_an_epoch(tmp_path, directory):
    changes = json.dumps({"max_steps": -1, "num_train_epochs": 2, "data_seed": 7})
    words = ["--rule", "async_diloco", "--changes", changes]
    python(tmp_path, *LAUNCH, "--run", directory, SCRIPT, "out", *words, "--kill", 0, 11)
    python(tmp_path, *LAUNCH, "--run", tmp_path / "whole", SCRIPT, "undisturbed", *words)
    killed, whole = found_by(tmp_path / "out", 0), found_by(tmp_path / "undisturbed", 0)
    assert killed["began"] == 9
    assert killed["ended"] == whole["ended"] == 2 * EPOCH
    assert killed["rates"] == whole["rates"][9:]
    assert killed["rows"][: 7 * BATCH] == whole["rows"][9 * BATCH : 16 * BATCH]
    second = found_by(tmp_path / "undisturbed", 1)
    for epoch in range(2):
        part = slice(epoch * EPOCH * BATCH, (epoch + 1) * EPOCH * BATCH)
        assert sorted(whole["rows"][part] + second["rows"][part]) == list(range(len(Rows())))
    assert whole["rows"][:32] != whole["rows"][32:64]

    # All are done: a run that goes on makes no step more.
    python(tmp_path, *LAUNCH, "--run", tmp_path / "whole", SCRIPT, "again", *words)
    again = found_by(tmp_path / "again", 0)
    assert (again["ended"], again["rates"], again["rows"]) == (16, [], [])
    assert again["eval_loss"] == whole["eval_loss"]


@pytest.mark.slow
def test_torchrun_is_refused_where_the_trainer_would_use_ddp(tmp_path):
    output = python(tmp_path, *TORCHRUN, SCRIPT, "out", fails=True)
    assert "would train in parallel by itself (distributed)" in output
    assert "call `springline.integrations.huggingface.local()`" in output
    assert not list(tmp_path.glob("out/rank-*.json"))


def test_torchrun_without_ddp(tmp_path, memories):
    output = python(tmp_path, *TORCHRUN, SCRIPT, "out", "--apart")
    first, second = (found_by(tmp_path / "out", rank) for rank in (0, 1))
    assert first["wrapped"] == second["wrapped"] == "GPT2LMHeadModel"
    assert first["version"] == second["version"] == 4  # 12 steps, τ = 3
    assert set(first["rows"][:32]).isdisjoint(second["rows"][:32])
    assert first["eval_loss"] == second["eval_loss"]
    assert "Traceback" not in output
    assert memories(tmp_path) == []
