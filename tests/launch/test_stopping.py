"""Ctrl-C, once and twice, and the other ways to ask a run to stop."""

import os
import signal

import pytest
from launched import TRAINING, alive, wait_for
from safetensors.numpy import load_file

from springline.launch.process import WorkerProcess


def test_ctrl_c_saves_the_center_and_the_run_can_go_on(train, command, run):
    stopped = train("average", 1000, 0.02)
    wait_for(lambda: run.at_work(4))
    pids = [run.running(rank) for rank in range(3)]
    stopped.send(signal.SIGINT)
    assert stopped.wait(20) == 130
    assert not any(alive(pid) for pid in pids)
    assert (run.path / "stop").exists()
    # Interrupted, unless one has just seen RUN/stop.
    ends = {("stopped", -signal.SIGINT), ("stopped", 0)}
    assert {(w.state, w.exit_code) for w in run.state.workers} <= ends
    assert all("is at its end" in run.log(rank) for rank in range(3))  # finally blocks ran
    assert (load_file(run.path / "center.safetensors")["w"] > 0).all()
    assert f"springline run --run {run.path.name} {TRAINING} average 1000 0.02" in stopped.output
    reached = run.steps()
    assert all(4 <= steps < 1000 for steps in reached)

    on = command("run", "--run", run.path, TRAINING, "average", max(reached) + 10, 0)
    assert on.process.returncode == 0, on.output
    assert "Going on" in on.output
    assert run.steps() == [max(reached) + 10] * 3
    assert run.log(0).count("--- rank 0, start") == 2


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.argv = ["training.py", "elastic", "100000", "0.01"]
sys.path.insert(0, {folder!r})
import training
training.main("elastic", 100000, 0.01)
"""


@pytest.fixture
def stubborn(script):
    """A training script that no signal but SIGKILL ends, and that does not look at RUN/stop."""
    text = STUBBORN.format(folder=str(TRAINING.parent))
    return script(text.replace("import training\n", "import springline, training\n" + FOR_EVER))


FOR_EVER = "springline.steps = lambda total: range(springline.start_step(), total)\n"


def test_a_second_ctrl_c_kills_at_once(start_command, run, stubborn):
    command = start_command("run", "--run", run.path, "--workers", 3, stubborn)
    wait_for(lambda: run.at_work(4))
    pids = [run.running(rank) for rank in range(3)]
    command.send(signal.SIGINT)
    wait_for(lambda: "Ctrl-C again kills" in command.output)
    assert all(alive(pid) for pid in pids)
    command.send(signal.SIGINT)
    wait_for(lambda: not any(alive(pid) for pid in pids), seconds=3)
    assert command.wait(20) == 130
    assert [w.exit_code for w in run.state.workers] == [-signal.SIGKILL] * 3
    assert (load_file(run.path / "center.safetensors")["w"] > 0).all()
    assert run.memory() == []


@pytest.mark.slow
def test_workers_that_do_not_listen_are_killed_within_seconds(start_command, run, stubborn):
    command = start_command("run", "--run", run.path, "--workers", 2, stubborn)
    wait_for(lambda: run.at_work(4))
    command.send(signal.SIGINT)
    assert command.wait(30) == 130
    assert [w.exit_code for w in run.state.workers] == [-signal.SIGKILL] * 2
    assert (run.path / "center.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_the_run_too(train, run, number):
    command = train("agn", 1000, 0.02)
    wait_for(run.at_work)
    command.send(number)
    assert command.wait(20) == 128 + number
    assert (run.path / "center.safetensors").exists()
    assert all("is at its end" in run.log(rank) for rank in range(3))


def test_a_worker_that_was_to_be_restarted_is_not(train, run):
    command = train("elastic", 1000, 0.02)
    wait_for(run.at_work)
    os.kill(run.running(2), signal.SIGKILL)
    wait_for(lambda: run.worker(2).state == "restarting")
    command.send(signal.SIGINT)
    assert command.wait(20) == 130
    assert run.worker(2).state == "stopped"
    assert run.worker(2).restarts == 0


def test_a_script_can_ask_all_workers_to_stop(command, script, run):
    path = script(
        "import springline, time\n"
        "for step in springline.steps(100_000):\n"
        "    if springline.rank() == 1 and step == 5:\n"
        "        springline.stop()\n"
        "    time.sleep(0.01)\n"
    )
    ran = command("run", "--run", run.path, "--workers", 3, path)
    assert ran.process.returncode == 0
    assert [w.state for w in run.state.workers] == ["finished"] * 3


def test_a_signal_to_a_worker_that_has_just_ended_changes_nothing(tmp_path):
    """It ends on its own between two looks, while the launch is being stopped."""
    worker = WorkerProcess(["-c", "raise SystemExit(3)"], tmp_path, 0, os.environ)
    worker.start()
    os.waitid(os.P_PID, worker.entry.pid, os.WEXITED | os.WNOWAIT)
    worker.send(signal.SIGINT)
    assert worker.look()
    assert worker.entry.exit_code == 3
