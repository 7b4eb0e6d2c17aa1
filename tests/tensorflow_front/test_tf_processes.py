"""Clusters of real processes: trained by the command, killed, started again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import free_ports
from tf_script import BEST

from springline.launch_state import LaunchState

SCRIPT = Path(__file__).with_name("tf_script.py")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "200"}


def wait_for(condition, seconds=60.0):
    """Ask again and again until the answer is true; return it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return answer


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Run:
    """A run of the script by the real command."""

    def __init__(self, path):
        self.path = path
        self.output = path.with_suffix(".output")
        self.process = None

    def start(self, *words):
        command = [sys.executable, "-m", "springline.cli", "run", "--no-live"]
        command += ["--run", str(self.path), *map(str, words)]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET},
            )

    def cluster(self, ps, workers, *words, restarts=0):
        self.start("--ps", ps, "--workers", workers, "--max-restarts", restarts, SCRIPT, *words)

    def wait(self, status):
        """Wait for the end, and see that it is this one."""
        assert self.process.wait(200) == status, self.said()

    def said(self):
        return self.output.read_text()

    def lines(self, rank, key):
        """The lines of a worker's metrics that have a value of this name."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.path / "metrics" / f"rank-{rank}.jsonl").read_text()
            return [line for line in map(json.loads, text.splitlines()) if key in line]
        return []

    def steps(self, rank, key="global_step"):
        return len(self.lines(rank, key))

    def wait_for(self, condition):
        def ended_or_true():
            assert self.process.poll() is None, self.said()
            return condition()

        wait_for(ended_or_true)

    def kill(self, rank, job="workers"):
        os.kill(getattr(LaunchState.read(self.path), job)[rank].pid, signal.SIGKILL)

    def pids(self):
        state = LaunchState.read(self.path)
        return [entry.pid for entry in (*state.workers, *state.ps) if entry.pid]

    def saved(self):
        """The newest checkpoint: its step and the center."""
        path = tf.train.latest_checkpoint(self.path / "checkpoints")
        if path is None:
            return 0, None
        reader = tf.train.load_checkpoint(path)
        names = [f"global_center_variable/{name}" for name in "wv"]
        return reader.get_tensor("global_step"), np.stack([reader.get_tensor(n) for n in names])

    def stop(self):
        (self.path / "stop").touch()


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    if run.process:
        run.process.kill()  # its tasks die with it
        run.process.wait()
    if (run.path / "launch.json").exists():
        wait_for(lambda: not any(map(alive, run.pids())))


@pytest.mark.slow
def test_elastic_nobody_waits_and_whoever_comes_joins(run):
    run.cluster(2, 3, "elastic", "--last-waits", restarts=1)
    run.wait_for(lambda: run.steps(0) > 20 and run.steps(1) > 20)  # the third is not there yet
    assert run.steps(2) == 0
    (run.path / "come").touch()
    run.wait_for(lambda: run.steps(2) > 10)

    run.kill(1)  # a worker
    at = run.steps(0)
    run.wait_for(lambda: run.steps(1, "found_step") == 2)
    assert run.steps(0) > at

    run.kill(0)  # the chief, whose only checkpoint is of step 0
    before = run.lines(0, "global_step")[-1]["global_step"]
    assert run.saved()[0] == 0
    run.wait_for(lambda: run.steps(0, "found_step") == 2)
    found = run.lines(0, "found_step")[-1]
    assert found["found_step"] >= before > 0
    assert found["found_center"] == pytest.approx(BEST[0], abs=0.5)

    at = [run.steps(k) for k in range(3)]
    run.wait_for(lambda: all(run.steps(k) > at[k] + 100 for k in range(3)))
    run.stop()
    run.wait(0)
    step, center = run.saved()
    assert step > found["found_step"]
    np.testing.assert_allclose(center, [BEST, BEST], atol=0.01)
    for k in range(3):  # the center was never set back
        counts = [line["global_step"] for line in run.lines(k, "global_step")]
        assert counts == sorted(counts)
    said = run.said()
    assert "on 3 workers and 2 parameter servers" in said
    for rank in (0, 1):
        assert f"Worker {rank} was killed by SIGKILL; restart 1 of 1." in said
    assert "No center was made" not in said
    assert (run.path / "plot.png").exists()


@pytest.mark.slow
def test_average_waits_for_a_worker_that_is_restarted_and_not_for_one_that_has_ended(run):
    words = ["--last-step", 60, "--dies-at", 5, "--ends-at", 40]
    run.cluster(2, 3, "average", *words, restarts=1)
    run.wait(0)
    step, center = run.saved()
    assert step == 60
    np.testing.assert_allclose(center, [BEST, BEST], atol=0.01)
    first, second = run.lines(1, "found_step")
    assert first["found_step"] == 0
    assert 5 <= second["found_step"] <= 6  # the round that it had contributed to was closed
    assert "Worker 1 was killed by SIGKILL; restart 1 of 1." in run.said()
    assert run.lines(2, "global_step")[-1]["global_step"] == 40  # and the others went on


@pytest.mark.slow
def test_agn_finds_the_best_with_a_worker_that_is_restarted(run):
    run.cluster(2, 3, "agn", "--dies-at", 5, restarts=1)
    run.wait_for(lambda: run.steps(1, "found_step") == 2)
    at = [run.steps(k) for k in range(3)]
    run.wait_for(lambda: all(run.steps(k) > at[k] + 100 for k in range(3)))
    run.stop()
    run.wait(0)
    np.testing.assert_allclose(run.saved()[1], [BEST, BEST], atol=0.01)


@pytest.mark.slow
def test_average_names_a_worker_that_does_not_come(run):
    run.cluster(1, 3, "average", "--timeout", 2, "--last-leaves")
    run.wait(1)
    said = run.said()
    assert "Waited 2 s for round 1; missing: /job:worker/task:2. Are they running?" in said
    states = [worker.state for worker in LaunchState.read(run.path).workers]
    assert states[2] == "finished"
    assert "failed" in states[:2]


@pytest.mark.slow
def test_synchronous_starts_nobody_until_all_are_there(run):
    run.cluster(1, 3, "elastic", "--synchronous", "--last-waits")
    run.wait_for(lambda: run.steps(0, "found_step") and run.steps(1, "found_step"))
    (run.path / "come").touch()
    run.wait_for(lambda: all(run.steps(k) > 2 for k in range(3)))
    run.stop()
    run.wait(0)
    (came,) = run.lines(2, "came")
    firsts = [run.lines(k, "global_step")[0]["time"] for k in range(3)]
    assert min(firsts) > came["time"]


@pytest.mark.slow
def test_everything_killed_goes_on_from_the_checkpoint_and_a_dead_ps_ends_the_run(run):
    words = ["elastic", "--save-every", 10]
    run.cluster(2, 2, *words)
    run.wait_for(lambda: run.saved()[0] >= 20)
    pids = run.pids()
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not any(map(alive, pids)))
    step, center = run.saved()

    run.start(SCRIPT, *words)  # as many as there were
    run.wait_for(lambda: run.steps(0, "found_step") == 2 and run.steps(1, "found_step") == 2)
    found = run.lines(0, "found_step")[-1]
    assert found["found_step"] == step
    assert found["found_center"] == pytest.approx(center[0][0])
    assert run.lines(1, "found_step")[-1]["found_step"] >= step
    assert "Going on with the run" in run.said()

    run.wait_for(lambda: run.saved()[0] > step)
    pids = run.pids()
    assert len(pids) == 4
    run.kill(1, "ps")
    run.wait(1)
    said = run.said()
    assert "Parameter server 1 was killed by SIGKILL, and its part of the center is gone" in said
    assert "It can go on from the last checkpoint" in said
    assert "The last lines of parameter server 1" in said
    assert f"with: springline run --run {run.path}" in said
    assert not any(map(alive, pids))
    state = LaunchState.read(run.path)
    assert [entry.state for entry in state.ps] == ["stopped", "failed"]
    assert {entry.state for entry in state.workers} <= {"stopped", "finished"}


def test_without_the_command_a_worker_reports_a_dead_ps(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    jobs = {"ps": addresses[:1], "worker": addresses[1:]}
    words = [sys.executable, str(SCRIPT), "elastic", "--ps-timeout", "1"]
    with contextlib.ExitStack() as stack:

        def task(job):
            config = json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}})
            place = {"TF_CONFIG": config, "SPRINGLINE_RUN": str(tmp_path)}
            process = subprocess.Popen(
                words, env={**os.environ, **QUIET, **place}, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        ps, worker = task("ps"), task("worker")
        run = Run(tmp_path)
        wait_for(lambda: run.steps(0) > 2)
        ps.kill()  # it may not have lived from one look to the next
        _, said = worker.communicate(timeout=200)
        assert worker.returncode == 1
        sentence = f"the parameter server /job:ps/task:0 at {addresses[0]} has been out of reach"
        assert sentence in said
