"""Workers and launchers that are killed or stopped, under each rule."""

import json
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from launched import TRAINING, RunOnDisk, all_gone, wait_for
from safetensors.numpy import load_file

from marks import slow
from springline.center import SharedCenter
from springline.center.locks import SHARD

RULES = ("elastic", "average", "agn")


@pytest.fixture
def under_each_rule(tmp_path, together):
    """`under_each_rule(test)` calls `test(rule, run)` for all rules at once, in threads."""

    def under_each_rule(test):
        together(*(partial(test, rule, RunOnDisk(tmp_path / rule)) for rule in RULES))

    return under_each_rule


@pytest.mark.slow
def test_a_worker_that_is_killed_again_and_again_makes_its_steps(train, under_each_rule):
    steps, kills = 150, 5

    def check(rule, run):
        command = train(rule, steps, 0.02, "--max-restarts", kills, at=run)
        reached = 0
        for kill in range(kills):
            # Each incarnation comes further than the one before: it goes on from where that was.
            wait_for(partial(run.further, 1, reached))
            reached = run.steps()[1]
            assert run.worker(1).restarts == kill
            os.kill(run.running(1), signal.SIGKILL)
        assert command.wait() == 0, command.output
        assert run.steps() == [steps] * 3
        assert [w.restarts for w in run.state.workers] == [0, kills, 0]
        assert [w.state for w in run.state.workers] == ["finished"] * 3
        assert f"restart {kills} of {kills}" in command.output
        assert np.isfinite(load_file(run.path / "center.safetensors")["w"]).all()

    under_each_rule(check)


@pytest.mark.parametrize("seconds", slow(3, 10))
def test_a_worker_that_is_stopped_for_a_while_goes_on(train, under_each_rule, seconds):
    steps = 60

    def check(rule, run):
        command = train(rule, steps, 0.02, at=run)
        wait_for(run.at_work)
        pid = run.running(0)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        assert run.running(0) == pid
        os.kill(pid, signal.SIGCONT)
        assert command.wait() == 0
        assert run.steps() == [steps] * 3
        assert [w.restarts for w in run.state.workers] == [0, 0, 0]

    under_each_rule(check)


def test_a_killed_launcher_takes_its_workers_along_and_leaves_the_center(
    train, command, under_each_rule, tmp_path
):
    def check(rule, run):
        killed = train(rule, 10_000, 0.02, at=run)
        wait_for(partial(run.at_work, 6))
        pids = [run.running(rank) for rank in range(3)]
        killed.send(signal.SIGKILL)
        killed.wait()
        wait_for(partial(all_gone, pids), seconds=5)
        assert run.memory()

        with SharedCenter.open(run.path / "center") as center:
            values, version = center.values()["w"], center.version
        exported = command("export", run.path, tmp_path / f"{rule}.safetensors")
        assert exported.process.returncode == 0, exported.output
        assert f"version {version}, from memory" in exported.output
        np.testing.assert_array_equal(load_file(tmp_path / f"{rule}.safetensors")["w"], values)

        reached = run.steps()
        steps = max(reached) + 10
        on = train(rule, steps, 0.0, at=run)
        assert on.wait() == 0, on.output
        assert "Going on with the run" in on.output
        assert run.steps() == [steps] * 3
        text = (run.path / "metrics" / "rank-0.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        begun = [line["step"] for line in lines if line.keys() == {"time", "step"}]
        assert begun == [0, reached[0]]  # not from the start again
        assert run.memory() == []

    under_each_rule(check)


def test_workers_that_ignore_signals_end_with_their_launcher_too(start_command, run, script):
    path = script(
        "import signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = start_command("run", "--run", run.path, "--workers", 2, path)
    wait_for(lambda: all(run.running(r) and "deaf" in run.log(r) for r in range(2)))
    pids = [run.running(rank) for rank in range(2)]
    command.send(signal.SIGKILL)
    wait_for(partial(all_gone, pids), seconds=5)


def test_what_workers_have_started_ends_with_a_killed_launcher_too(start_command, run, script):
    path = script(
        "import os, time, subprocess, sys\n"
        "child = os.fork()\n"
        "if child:\n"
        "    other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "    print('children', child, other.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = start_command("run", "--run", run.path, "--workers", 2, path)
    wait_for(lambda: all(run.running(r) and "children" in run.log(r) for r in range(2)))
    pids = [run.running(rank) for rank in range(2)]
    for rank in range(2):
        words = run.log(rank).split("children")[1].split()
        pids += [int(word) for word in words[:2]]
    assert not all_gone(pids)
    command.send(signal.SIGKILL)
    wait_for(partial(all_gone, pids), seconds=5)


DRIVER = """
import sys
from pathlib import Path
from springline.launch import keeper
from springline.launch.launcher import Launcher
from springline.launch.program import Program
keeper.EVERY = 0.2
program = Program(sys.argv[2], sys.argv[3:])
launcher = Launcher(program, workers=2, directory=Path(sys.argv[1]))
sys.exit(launcher.run(TICK))
"""


def test_the_center_is_saved_again_and_again_and_the_watching_never_waits(start_command, run):
    start_command(
        run.path, TRAINING, "elastic", 100_000, 0.01, driver=("-c", DRIVER.replace("TICK", ""))
    )
    saved = [0.0]

    def saved_anew():
        now = run.state and run.state.checkpoint
        if now and now > saved[-1]:
            saved.append(now)
        return len(saved) > 3

    wait_for(saved_anew)
    with SharedCenter.open(run.path / "center") as center, center.locks.acquire(SHARD):
        # As if a worker had been stopped in the middle of an exchange: the checkpoint waits.
        wait_for(lambda: time.time() - run.state.checkpoint > 1)
        os.kill(run.running(1), signal.SIGKILL)
        wait_for(lambda: run.worker(1).restarts == 1 and run.running(1))
    saved = [run.state.checkpoint]
    wait_for(lambda: run.state.checkpoint > saved[0])


def test_a_screen_that_fails_ends_the_run_but_leaves_no_worker_and_saves_the_center(
    start_command, run
):
    tick = "lambda: 1 / (not Path('the terminal is gone').exists())"
    words = (run.path, TRAINING, "elastic", 100_000, 0.01)
    command = start_command(*words, driver=("-c", DRIVER.replace("TICK", tick)))
    wait_for(run.at_work)
    pids = [run.running(rank) for rank in range(2)]
    (run.path.parent / "the terminal is gone").touch()
    assert command.wait(20) == 1
    assert "ZeroDivisionError" in command.output
    assert all_gone(pids)
    assert (run.path / "center.safetensors").exists()
    assert run.state.ended


def test_a_stopped_worker_is_reported(start_command, run):
    command = start_command(
        "run", "--run", run.path, "--workers", 2, TRAINING, "elastic", 100_000, 0
    )
    wait_for(lambda: run.at_work(4))
    pid = run.running(1)
    os.kill(pid, signal.SIGSTOP)
    words = f"Worker 1 (process {pid}) is stopped"
    wait_for(lambda: words in command.output)
    os.kill(pid, signal.SIGCONT)
    command.send(signal.SIGINT)
    assert command.wait() != 0
    assert command.output.count(words) == 1
