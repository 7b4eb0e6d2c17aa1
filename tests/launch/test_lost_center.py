"""A center that is removed, damaged or replaced while its run goes on."""

import os
import shutil
import signal
from functools import partial

import numpy as np
import pytest
from launched import TRAINING, RunOnDisk, wait_for
from safetensors.numpy import load_file

from marks import slow
from springline import ElasticAverage, SharedCenter
from springline.center import Layout
from springline.center.checkpoint import describe, previous

STEPS = 80
VALUES = {"other": np.zeros(4, np.float32)}


def remove_memory(run):
    (home,) = run.memory()
    (home / "center.memory").unlink()


def remove_memory_and_all_beside_it(run):
    (home,) = run.memory()
    shutil.rmtree(home)


def remove_layout(run):
    (run.path / "center" / "layout.json").unlink()


def damage_layout(run):
    (run.path / "center" / "layout.json").write_text("garbage")


def replace_layout(run):
    other = run.path.with_name(f"{run.path.name}-other")
    SharedCenter.create_or_join(other, Layout.of(VALUES), ElasticAverage(), VALUES).close()
    shutil.copy(other / "layout.json", run.path / "center" / "layout.json")


def remove_lock(run):
    (run.path / "center" / "lock").unlink()


def remove_center(run):
    shutil.rmtree(run.path / "center")


LOSSES = {
    remove_memory: (0, "center.memory was removed during the run"),
    remove_memory_and_all_beside_it: (0, "center.memory was removed during the run"),
    remove_layout: (0, "layout.json was removed during the run"),
    damage_layout: (0, "layout.json was damaged during the run"),
    replace_layout: (0, "layout.json was replaced by another center's during the run"),
    remove_lock: (0, "The center is in"),
    remove_center: (1, "It lacks what the model has beside the center"),
}


@pytest.fixture
def at_work(train):
    """`at_work(run)` starts a run and returns when its launcher has seen the center."""

    def at_work(run, *options):
        command = train("elastic", STEPS, 0.04, *options, at=run)
        wait_for(partial(run.at_work, 20))
        return command

    return at_work


def check_saved(run):
    """The center, its checkpoint and the file are those of all steps of all workers."""
    saved = run.path / "center" / "checkpoint.safetensors"
    assert describe(saved).steps == [STEPS] * 3
    assert describe(saved).version == 3 * STEPS // 2
    final = load_file(run.path / "center.safetensors")["w"]
    np.testing.assert_array_equal(final, load_file(saved)["center/w"])
    assert run.memory() == []


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("losses", [[remove_memory, remove_center], *slow([*LOSSES])])
def test_the_launcher_saves_what_the_workers_have_and_says_what_was_lost(
    at_work, together, tmp_path, losses, saved
):
    def check(lose):
        run = RunOnDisk(tmp_path / lose.__name__)
        command = at_work(run)
        if saved:
            with SharedCenter.open(run.path / "center") as center:
                center.save()
        lose(run)
        status, sentence = LOSSES[lose]
        assert command.wait() == status, command.output
        assert sentence in command.output
        assert "No center was made" not in command.output
        check_saved(run)

    together(*(partial(check, lose) for lose in losses))


@pytest.mark.slow
def test_a_run_that_had_lost_its_layout_goes_on(at_work, command, run):
    lost = at_work(run)
    remove_center(run)
    assert lost.wait() == 1
    on = command("run", "--run", run.path, TRAINING, "elastic", STEPS + 10, 0)
    assert on.process.returncode == 0, on.output
    assert run.steps() == [STEPS + 10] * 3


@pytest.mark.parametrize("lose", [remove_memory, *slow(remove_layout, remove_lock, remove_center)])
def test_a_worker_that_comes_back_is_refused_and_the_center_is_saved(at_work, run, lose):
    command = at_work(run, "--max-restarts", 1)
    before = min(run.steps())
    lose(run)
    os.kill(run.running(1), signal.SIGKILL)
    assert command.wait() == 1
    assert "has members but its memory is not on this machine" in command.output
    saved = describe(run.path / "center" / "checkpoint.safetensors")
    assert min(saved.steps) >= before
    assert saved.version >= 3 * before // 2


def test_one_that_comes_back_alone_is_refused_too(start_command, run):
    words = ("--workers", 1, "--max-restarts", 0, TRAINING, "elastic", 1000, 0.04)
    command = start_command("run", "--run", run.path, *words)
    wait_for(partial(run.at_work, 20))
    remove_memory(run)
    os.kill(run.running(0), signal.SIGKILL)
    assert command.wait() == 1
    assert run.steps()[0] >= 20
    assert (load_file(run.path / "center.safetensors")["w"] > 0).all()


def test_what_is_left_is_named_if_nothing_can_be_saved(at_work, run):
    command = at_work(run)
    saved = run.path / "center" / "checkpoint.safetensors"
    with SharedCenter.open(run.path / "center") as center:
        center.save()
    left = describe(saved).version
    saved.rename(previous(saved))
    for blocked in (saved, run.path / "center.safetensors"):
        (blocked / "in the way").mkdir(parents=True)
    remove_memory(run)
    assert command.wait() == 1
    older = 3 * STEPS // 2 - left
    sentence = f"What is left of it is {previous(saved)}, version {left}, {older} exchanges older."
    assert sentence in command.output
    assert "still in memory" not in command.output
    assert "No center was made" not in command.output


LOSE_AT_ONCE = """
import sys
from springline import SharedCenter
publish = SharedCenter._publish
def lose_and_publish(self):
    self._path.unlink()  # as if right after it was made, and before anybody else could open it
    publish(self)
SharedCenter._publish = lose_and_publish
SharedCenter.check_current = lambda self: None
sys.path.insert(0, {folder!r})
import training
training.main("elastic", {steps}, 0.01)
"""


def test_a_center_that_the_launcher_never_saw_is_lost_and_not_unmade(command, script, run):
    path = script(LOSE_AT_ONCE.format(folder=str(TRAINING.parent), steps=20))
    words = ("run", "--run", run.path, "--workers", 1)
    first = command(*words, path)
    assert first.process.returncode == 1
    assert "The center was lost during the run" in first.output
    assert "Nothing is left of it: there is no checkpoint." in first.output
    assert "No center was made" not in first.output
    assert "The center is in" not in first.output


def test_an_old_checkpoint_is_not_the_result(command, script, run):
    words = ("run", "--run", run.path, "--workers", 1)
    assert command(*words, TRAINING, "elastic", 20, 0).process.returncode == 0
    path = script(LOSE_AT_ONCE.format(folder=str(TRAINING.parent), steps=40))
    second = command(*words, "--yes", path)
    assert second.process.returncode == 1
    saved = run.path / "center" / "checkpoint.safetensors"
    assert f"What is left of it is {saved}, version 10." in second.output
    assert "The center is in" not in second.output


RETIRE = """
import sys, time
import numpy as np
import springline
rule, values = springline.ElasticAverage(period=1, moving_rate=1.0), {"w": np.zeros(4, np.float32)}
with springline.Worker(values, rule, springline.directory() / "center") as worker:
    time.sleep(float(sys.argv[1]))
    worker.parameters["w"] += 1
    worker.step()
worker.center.retire()
"""


def test_a_center_that_the_script_retires_is_not_lost(command, script, run):
    """Whether or not the launcher has seen it before."""
    path = script(RETIRE)
    for seconds, value in ((0, 1), (1, 2)):
        ran = command("run", "--run", run.path, "--workers", 1, path, seconds)
        assert ran.process.returncode == 0, ran.output
        assert "removed" not in ran.output
        assert load_file(run.path / "center.safetensors")["w"].tolist() == [value] * 4
    assert run.memory() == []


def test_a_launch_in_which_nobody_joins_says_so(command, script, run):
    assert command("run", "--run", run.path, "--workers", 1, script(RETIRE), 0).wait() == 0
    path = script("print('idle')", "idle.py")
    idle = command("run", "--run", run.path, "--workers", 1, "--yes", path)
    assert idle.process.returncode == 0
    assert "No worker has joined the center in this launch" in idle.output


@pytest.mark.slow
def test_a_second_center_in_the_same_place_ends_the_run_with_an_error(at_work, run):
    command = at_work(run)
    remove_memory(run)
    remove_center(run)
    os.kill(run.running(1), signal.SIGKILL)
    assert command.wait() == 1
    assert f"Another center was made in {run.path / 'center'}." in command.output
    assert f"is in {run.path / 'center.safetensors'}" in command.output
    for home in run.memory():
        shutil.rmtree(home)
