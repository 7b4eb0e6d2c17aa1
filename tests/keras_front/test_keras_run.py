"""`model.fit` on two workers, under the real command."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import springline
from launch.launched import wait_for
from marks import slow
from springline.monitor.metrics import read_metrics
from springline.rules.reference import Twin

HERE = Path(__file__).parent
SCRIPT = HERE / "keras_run.py"
EXAMPLE = HERE.parents[1] / "examples" / "keras_digits.py"
BACKENDS = ["jax", *slow("torch", "tensorflow")]
STEPS, BATCH, TIMEOUT = 13, 8, 250


def ended(command):
    assert command.wait(TIMEOUT) == 0, command.output
    return command.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_workers_in_rounds_are_the_twin(launch, directory, backend):
    ended(launch(backend, SCRIPT, "numbers"))
    found = [np.load(directory / f"numbers-{rank}.npz") for rank in range(2)]
    truth = np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
    xs = [np.random.default_rng(r).normal(size=(104, 4)).astype(np.float32) for r in range(2)]

    def gradient(rank, step, x):
        rows = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
        error = xs[rank][rows] @ (x["kernel"] - truth) + x["bias"] - rank
        return {"kernel": 2 * xs[rank][rows].T @ error / BATCH, "bias": 2 * error.mean(0)}

    for name, kind in (("average", springline.ModelAverage), ("diloco", springline.DiLoCo)):
        start = {"kernel": np.zeros((4, 1), np.float32), "bias": np.zeros(1, np.float32)}
        twin = Twin(kind(period=5, workers=2), start, springline.outer.SGD(0.05), gradient)
        list(twin.run([[0, 1]] * (2 * STEPS)))
        twin.exchange([0, 1])  # what the last period has left over
        expected = np.concatenate([twin.c["kernel"].ravel(), twin.c["bias"]])
        for ours in found:  # both hold the center
            np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_the_example_saves_the_center(launch, start, directory, tmp_path, run, backend):
    output = ended(launch(backend, EXAMPLE, "--epochs", 8))
    (reported,) = re.findall(r"Accuracy of the center: ([\d.]+)%", output)
    assert float(reported) > 85
    assert run.steps() == [21 * 8, 21 * 8]  # 649 and 648 images
    metrics = read_metrics(directory)
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= metrics[0].values.keys()
    assert int((directory / "total").read_text()) == 21 * 8
    loaded = tmp_path / "loaded.py"
    loaded.write_text(
        "import keras, numpy as np\n"
        "m = keras.saving.load_model('digits.keras')\n"
        "np.savez('saved.npz', *m.get_weights())\n"
        "print([w.path for w in m.weights])\n"
    )
    ended(start(backend, loaded))
    center = load_file(directory / "center.safetensors")
    saved = list(np.load(tmp_path / "saved.npz").values())
    assert sorted(v.tobytes() for v in center.values()) == sorted(v.tobytes() for v in saved)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
@pytest.mark.parametrize("rule", ["ModelAverage", "DiLoCo", "AsyncDiLoCo"])
def test_the_example_under_the_other_rules(launch, backend, rule):
    output = ended(launch(backend, EXAMPLE, "--epochs", 15, "--rule", rule))
    (reported,) = re.findall(r"Accuracy of the center: ([\d.]+)%", output)
    assert float(reported) > 90


def killed(run, command, rank, step):
    """Kill a worker once it has come so far; return how far that was when the run has ended."""
    wait_for(lambda: run.further(rank, step), 120)
    reached = run.steps()[rank]
    os.kill(run.running(rank), signal.SIGKILL)
    ended(command)
    return reached


@pytest.mark.parametrize(
    "case",
    [
        "torch ElasticAverage",
        *slow("jax ElasticAverage", "jax ModelAverage", "torch DiLoCo", "tensorflow DiLoCo"),
        *slow("jax AGN", "torch AGN", "tensorflow AGN"),
    ],
)
def test_a_worker_that_is_killed_makes_the_rest_of_its_steps(launch, run, case):
    count, (backend, rule) = 12, case.split()
    command = launch(backend, SCRIPT, "epochs", rule, count, 0.03)
    reached = killed(run, command, 1, 3 * STEPS)
    assert run.steps() == [count * STEPS] * 2
    assert run.worker(1).restarts == 1
    epochs = [int(epoch) for epoch in re.findall(r"epoch (\d+)", run.log(1))]
    assert epochs[0] == 0
    assert 0 not in epochs[1:]  # the second incarnation began where the rank was
    assert epochs[-1] == count - 1
    (made,) = re.findall(r"made (\d+)", run.log(1))
    assert int(made) <= count * STEPS - reached


def test_a_worker_that_stops_early_waits_for_the_center_of_all(launch, run, directory):
    ended(launch("jax", SCRIPT, "early", 0.03))
    assert run.steps() == [2 * STEPS, 5 * STEPS]
    assert "final True" in run.log(0)
    assert "final False" in run.log(1)
    center = load_file(directory / "center.safetensors").values()
    flat = np.sort(np.concatenate([c.ravel() for c in center]))
    for rank in range(2):
        np.testing.assert_array_equal(np.sort(np.load(directory / f"model-{rank}.npy")), flat)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_backup_does_not_change_the_steps(launch, run, order):
    command = launch("jax", SCRIPT, "backup", order, 12, 0.03)
    killed(run, command, 1, 3 * STEPS)
    assert 12 * STEPS - 5 < run.steps()[1] <= 12 * STEPS
    assert run.steps()[0] == 12 * STEPS


@pytest.mark.slow
def test_two_calls_of_fit_and_a_kill_in_the_second(launch, run):
    command = launch("jax", SCRIPT, "twice", 6, 0.03)
    killed(run, command, 1, 8 * STEPS)
    assert run.steps() == [12 * STEPS] * 2
    assert run.log(1).count("between") == 2


@pytest.mark.slow
def test_generators_with_a_given_length(launch, run):
    command = launch("jax", SCRIPT, "endless", 8, 0.03)
    killed(run, command, 1, 3 * STEPS)
    assert run.steps() == [8 * STEPS] * 2


@pytest.mark.slow
def test_data_of_unknown_length(launch, run):
    command = launch("torch", SCRIPT, "unknown", 8, 0.03)
    killed(run, command, 1, 3 * STEPS)
    assert "begins with the first epoch again" in command.output
    assert run.steps() == [8 * STEPS] * 2
    assert [int(epoch) for epoch in re.findall(r"epoch (\d+)", run.log(1))].count(0) == 2


@pytest.mark.slow
def test_all_are_asked_to_stop(launch, run):
    output = ended(launch("jax", SCRIPT, "stopped", 0.01))
    assert max(run.steps()) < 1000 * STEPS, output


@pytest.mark.slow
def test_initial_epoch_is_refused_in_a_run(launch):
    command = launch("jax", SCRIPT, "initial")
    assert command.wait(TIMEOUT) != 0
    assert "In a run `fit` begins with epoch 0" in command.output
