"""Runs on a Ray cluster whose center has no storage, or cannot write to it any more."""

import os
import signal

import pytest
from clustered import ClusterRun
from launched import TRAINING, wait_for
from safetensors.numpy import load_file

from ray_cluster import actors_of, pid_of
from springline.launch.ray_keeper import center_name

pytestmark = pytest.mark.slow
PATIENCE = 120.0  # seconds for what takes a few, on a busy machine


@pytest.fixture
def run(tmp_path):
    return ClusterRun(tmp_path / "run")


@pytest.fixture
def train(start_command, run, cluster, tmp_path):
    """`train(storage, steps)` starts the training script on two workers of the cluster."""

    def train(storage, steps, *options):
        words = ["--address", "auto", "--workers", 2, "--run", run.path, "--storage", storage]
        return start_command("run", *words, *options, TRAINING, "elastic", steps, 0.05)

    return train


def test_a_shard_that_dies_without_a_storage_ends_the_run(train, command, run, tmp_path):
    """At once: no worker is started again, and there is no center any more."""
    running = train("none", 10_000, "--center-shards", 2)
    wait_for(lambda: run.at_work(4), PATIENCE)
    name = center_name(run.path)
    refused = command("export", run.path, tmp_path / "out.safetensors")
    assert "is on its cluster only (`--storage none`)" in refused.output
    os.kill(pid_of(actors_of(name)["shard-0"]), signal.SIGKILL)
    assert running.wait(PATIENCE) == 1, running.output
    assert "and has no checkpoint (`--storage none`): the run ends." in running.output
    assert "could not be saved: It is no longer on the cluster" in running.output
    assert "The center has 1 shard: this model cannot be cut into 2." in run.log(0) + run.log(1)
    assert [worker.restarts for worker in run.state.workers] == [0, 0]
    wait_for(lambda: actors_of(name) == {}, PATIENCE)
    assert not (run.path / "center.safetensors").exists()


def test_a_storage_that_is_behind_at_the_end_is_said(train, run, tmp_path):
    storage = tmp_path / "storage"
    running = train("storage", 100)
    wait_for(lambda: run.at_work(4), PATIENCE)
    (place,) = storage.iterdir()
    place.rename(tmp_path / "away")
    place.write_text("a file, where no checkpoint can be")
    assert running.wait(PATIENCE) == 0, running.output
    said = "The storage is older than the center that was saved here: no final checkpoint of "
    assert f"{said}{center_name(run.path)}/shard-0: Cannot read {place}" in running.output
    assert (load_file(run.path / "center.safetensors")["w"] > 0).all()
