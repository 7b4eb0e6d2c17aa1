"""Runs whose directory is copied or moved while their center is in memory."""

import signal
import subprocess

import numpy as np
import pytest
from launched import TRAINING, RunOnDisk, all_gone, wait_for
from safetensors.numpy import load_file

from springline.center import SharedCenter
from springline.center.checkpoint import describe


def copy(run):
    """As a user would."""
    target = run.path.with_name("copy")
    subprocess.run(["cp", "-r", run.path, target], check=True)
    return RunOnDisk(target)


def test_a_copy_of_a_live_run_is_another_run(train, command, run, tmp_path):
    original = train("elastic", 400, 0.04)
    wait_for(lambda: run.at_work(10))
    with SharedCenter.open(run.path / "center") as center:
        center.save()
    other = copy(run)
    saved = other.path / "center" / "checkpoint.safetensors"
    version = describe(saved).version

    exported = command("export", other.path, tmp_path / "out.safetensors")
    assert exported.process.returncode == 0, exported.output
    assert f"version {version} of" in exported.output
    assert f"from {saved}" in exported.output
    values = load_file(tmp_path / "out.safetensors")["w"]
    np.testing.assert_array_equal(values, load_file(saved)["center/w"])
    shown = command("top", "--once", other.path)
    assert shown.process.returncode == 0, shown.output
    assert f"center version {version}" in shown.output

    steps = max(describe(saved).steps) + 10
    on = command("run", "--run", other.path, TRAINING, "elastic", steps, 0)
    assert on.process.returncode == 0, on.output
    assert other.steps() == [steps] * 3
    assert f"The center goes on from {saved}, version {version}." in on.output
    assert any("is a copy; going on from" in other.log(rank) for rank in range(3))
    assert other.memory() == []
    assert original.process.poll() is None
    assert len(run.memory()) == 1
    reached = run.steps()
    original.send(signal.SIGINT)
    assert original.wait() == 130
    assert "removed" not in original.output
    assert all(end >= before for end, before in zip(run.steps(), reached, strict=True))


def test_a_copy_without_a_checkpoint_is_refused(train, command, run, tmp_path):
    train("elastic", 1000, 0.04)
    wait_for(lambda: run.at_work(10))
    other = copy(run)
    for words in (
        ["run", "--run", other.path, TRAINING, "elastic", 20, 0],
        ["export", other.path, tmp_path / "out.safetensors"],
    ):
        refused = command(*words)
        assert refused.process.returncode != 0
        assert f"copy of {run.path / 'center'}" in refused.output
        assert "Copy it again when it has a checkpoint" in refused.output
        assert "no worker has made one here" not in refused.output
    assert len(run.memory()) == 1


@pytest.mark.parametrize("plot", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_moved_run_is_found_again(train, command, run, tmp_path, plot):
    killed = train("elastic", 10_000, 0.02)
    wait_for(lambda: run.at_work(10))
    pids = [run.running(rank) for rank in range(3)]
    killed.send(signal.SIGKILL)
    wait_for(lambda: all_gone(pids))
    reached = run.steps()
    new = RunOnDisk(run.path.rename(tmp_path / "new"))
    another = command("run", "--run", run.path, "--workers", 1, TRAINING, "elastic", 4, 0)
    assert another.process.returncode == 0, another.output

    exported = command("export", new.path, tmp_path / "out.safetensors")
    assert "from memory" in exported.output
    shown = command("top", "--once", new.path)
    assert "no checkpoint yet" in shown.output
    if plot:
        drawn = command("plot", new.path, environment={"PYTHONPATH": None})
        assert drawn.process.returncode == 0, drawn.output
    assert new.steps() == reached
    on = command("run", "--run", new.path, TRAINING, "elastic", max(reached) + 10, 0)
    assert on.process.returncode == 0, on.output
    assert "The center goes on from" not in on.output  # it was in memory
    assert new.steps() == [max(reached) + 10] * 3
    assert new.memory() == []


def test_a_run_that_is_moved_while_it_goes_on_ends_where_it_is_now(train, command, run, tmp_path):
    going = train("elastic", 10_000, 0.02)
    wait_for(lambda: run.at_work(10))
    old = run.path
    new = RunOnDisk(run.path.rename(tmp_path / "new"))
    assert going.wait() == 1
    assert f"was moved from {old} to {new.path}" in going.output
    assert "springline run --run new " in going.output
    assert not old.exists()
    reached = new.steps()
    assert min(reached) >= 10
    version = describe(new.path / "center" / "checkpoint.safetensors").version
    assert f"(version {version:,})" in going.output
    assert new.memory() == []
    on = command("run", "--run", new.path, TRAINING, "elastic", max(reached) + 10, 0)
    assert on.process.returncode == 0, on.output
    assert new.steps() == [max(reached) + 10] * 3
