"""The small examples, each on a small setting and through the real command."""

import contextlib
import importlib
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from springline.center import CenterError, SharedCenter
from springline.center.checkpoint import describe, newest
from springline.monitor.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
GUESSING = math.log(10)  # the loss of who knows nothing of digits
LAUNCH = ["-m", "springline.cli", "run", "--no-live"]
SLOWER = 10


@pytest.fixture
def example(monkeypatch):
    """`example(name)` imports an example as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def start(tmp_path):
    """`start(*words)` starts Python with these words, in `tmp_path`."""
    started = []

    def start(*words):
        command = [sys.executable, *map(str, words)]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:  # workers die with their launcher
        process.kill()
        process.communicate()


@pytest.fixture
def alone(start):
    """`alone(name, *options)` runs an example as one worker and returns what it prints."""

    def alone(name, *options):
        process = start(EXAMPLES / f"{name}.py", *options)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return output

    return alone


@pytest.fixture
def two_workers(start, directory):
    """`two_workers(name, *options)` runs an example and returns what each worker prints."""

    def two_workers(name, *options):
        script = EXAMPLES / f"{name}.py"
        process = start(*LAUNCH, "--workers", 2, "--run", directory, script, *options)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return [log_of(directory, rank) for rank in range(2)]

    return two_workers


def log_of(directory, rank):
    return (directory / "logs" / f"rank-{rank}.log").read_text("utf-8")


def steps_of(directory):
    """How many steps each rank has made, when the run is over."""
    return describe(newest(directory / "center" / "checkpoint.safetensors")).steps


def number_after(words, text):
    """The last number that stands behind these words."""
    return float(re.findall(rf"{words}:? ([\d.e-]+)", text)[-1])


@pytest.mark.slow
def test_plain_loop_ends_alike_before_and_after(alone):
    before = alone("plain_loop", "--plain", "--steps", 83)  # the last period is cut short
    assert alone("plain_loop", "--steps", 83) == before
    assert number_after("Loss on the test images", before) < GUESSING / 2


def test_plain_loop_two_workers_end_with_their_mean(two_workers, directory):
    reported, nothing = two_workers("plain_loop", "--steps", 83)
    assert number_after("Loss on the test images", reported) < GUESSING / 2
    assert "Loss" not in nothing
    assert steps_of(directory) == [83, 83]
    first, second = (read_metrics(directory)[rank].values["loss"][1:] for rank in range(2))
    assert len(first) == len(second) == 83
    assert (first != second).all()  # each has its own images


IMAGES = ["--steps", 60, "--images", 4000, "--tests", 1000, "--batch", 64, "--period", 4]


def test_images_the_center_has_what_batchnorm_needs(two_workers, directory, example):
    reported = number_after("of the center", two_workers("images", *IMAGES)[0]) / 100
    assert reported > 0.75

    images, data = example("images"), example("data").mnist()
    test = images.tensors(data.test_images[:1000], data.test_labels[:1000])
    model = images.network()
    model.load_state_dict(load_file(directory / "center.safetensors"))
    right = images.accuracy(model, *test)
    assert right == pytest.approx(reported, abs=1e-4)

    for module in model:
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
    assert images.accuracy(model, *test) < right - 0.2

    seen = read_metrics(directory)[0].values["center_accuracy"]
    _at_its_start, at_its_end = seen[np.isfinite(seen)]
    assert at_its_end == pytest.approx(reported, abs=1e-4)


def test_epochs_each_worker_has_its_part(two_workers, directory):
    log, _ = two_workers("epochs", "--epochs", 2, "--images", 6400)
    assert number_after("Accuracy on the test images", log) > 80
    assert [f"epoch {n}: accuracy of the center" in log for n in range(3)] == [True, True, False]
    assert steps_of(directory) == [100, 100]


@pytest.mark.slow
def test_images_alone(alone):
    assert number_after("of the center", alone("images", *IMAGES)) > 75


STEPS, EARLY = 1200, 50


def test_resume_goes_on_from_the_center(start, directory, example):
    command = [*LAUNCH, "--workers", 2, "--run", directory]
    command += [EXAMPLES / "resume.py", "--steps", STEPS]
    interrupted = start(*command)
    wait_until_one_has_made(EARLY, directory, interrupted)
    interrupted.send_signal(signal.SIGINT)  # Ctrl-C
    output, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 128 + signal.SIGINT, output
    done = steps_of(directory)
    assert EARLY <= max(done) < STEPS
    resume, data = example("resume"), example("data").mnist()
    model = resume.network()
    model.load_state_dict(load_file(directory / "center.safetensors"))
    interrupted_at = resume.evaluate(model, data)

    again = start(*command)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert "Going on with the run" in output
    assert steps_of(directory) == [STEPS, STEPS]
    found = re.compile(r"starts at step (\d+), test loss (\S+)")
    starts = [found.findall(log_of(directory, rank))[-1] for rank in (0, 1)]
    assert [int(step) for step, _ in starts] == done
    # Nobody has exchanged before the first worker of the second part takes the center.
    assert min(abs(float(loss) - interrupted_at) for _, loss in starts) < 1e-6
    assert number_after("Test loss of the center", log_of(directory, 0)) < GUESSING / 8


def wait_until_one_has_made(steps, directory, process, seconds=60.0):
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(CenterError), SharedCenter.open(directory / "center") as center:
            if max(rank.steps for rank in center.progress()) >= steps:
                return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
def test_resume_alone_trains(alone):
    output = alone("resume", "--steps", 200)
    assert "Worker 0 starts at step 0," in output
    assert number_after("Test loss of the center", output) < GUESSING / 4


def test_mixed_precision_autocast(alone):
    output = alone("mixed_precision", "--steps", 100)
    assert "Parameters in torch.float32, computed in torch.bfloat16" in output
    assert number_after("accuracy of the center", output) > 75


@pytest.mark.slow
def test_mixed_precision_of_parameters_and_a_center_of_float32(two_workers, directory):
    log, _ = two_workers("mixed_precision", "--all-bfloat16", "--steps", 100)
    assert "Parameters in torch.bfloat16, computed in torch.bfloat16" in log
    assert number_after("accuracy of the center", log) > 75
    center = load_file(directory / "center.safetensors")
    assert {tensor.dtype for tensor in center.values()} == {torch.float32}
    weights = center["1.weight"]
    assert (weights.bfloat16().float() != weights).float().mean() > 0.1  # finer than bfloat16


def test_accelerate_digits_saves_the_center(two_workers, directory, tmp_path):
    log, nothing = two_workers("accelerate_digits", "--epochs", 2, "--out", "out")
    assert number_after("Accuracy of the center", log) > 60
    assert "Accuracy" not in nothing
    assert steps_of(directory) == [80, 80]
    center = load_file(directory / "center.safetensors")
    saved = load_file(tmp_path / "out" / "final" / "model.safetensors")
    assert all(torch.equal(saved[name], center[name]) for name in center)
    states = {path.name for path in (tmp_path / "out" / "state").iterdir()}
    assert states == {"worker-0", "worker-1"}


def test_huggingface_gpt2_alone(alone, tmp_path):
    output = alone("huggingface_gpt2", "--steps", 6, "--out", "out")
    assert number_after("Validation loss of the center", output) < math.log(65)  # characters
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["checkpoint-6"]


@pytest.mark.slow
def test_huggingface_gpt2_saves_the_center(two_workers, directory, tmp_path):
    log, _ = two_workers("huggingface_gpt2", "--steps", 60, "--out", "out")
    assert number_after("Validation loss of the center", log) < 3.3
    assert steps_of(directory) == [60, 60]
    center = load_file(directory / "center.safetensors")
    saved = load_file(tmp_path / "out" / "final" / "model.safetensors")
    assert all(torch.equal(saved[name], center[name]) for name in saved)


@pytest.mark.slow
def test_straggler_holds_up_averaging_but_not_elastic(start, directory, example):
    steps, period = 40, 5
    options = ["--workers", 2, "--steps", steps, "--period", period, "--out", directory]
    process = start(EXAMPLES / "straggler.py", *options)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output

    elastic, average = directory / "elastic", directory / "average"
    fast, slow = steps_of(elastic)
    assert slow == steps
    assert 2 * steps < fast <= steps * SLOWER
    waiting, slow = steps_of(average)
    assert slow == steps
    # It waits in every round; when the slow one has left it looks after 0.1 s at the latest.
    assert steps <= waiting <= steps + 0.1 / 0.005 + period
    assert last_loss(elastic) < last_loss(average) < GUESSING + 0.1

    pixels = np.asarray(Image.open(directory / "straggler.png").convert("RGB"))
    for _, color, _ in example("straggler").LOOKS.values():
        mine = (pixels == tuple(bytes.fromhex(color[1:]))).all(axis=2)
        left, right = np.split(mine, 2, axis=1)
        assert left.sum() > 100, f"no line of color {color}"
        assert right.sum() > 1000, f"no bars of color {color}"


def last_loss(directory):
    losses = read_metrics(directory)[0].values["center_loss"]
    return losses[np.isfinite(losses)][-1]
