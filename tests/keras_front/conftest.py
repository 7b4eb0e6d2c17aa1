"""Real commands in processes of their own: a process has one Keras backend."""

import os
import subprocess
import sys

import pytest

from launch.launched import Command, RunOnDisk


@pytest.fixture
def start(tmp_path, directory):
    """`start(backend, *words)` starts Python with these words, in `tmp_path`."""
    started = []

    def start(backend, *words):
        output = tmp_path / f"output-{len(started)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=tmp_path,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
        started.append(Command(process, output))
        return started[-1]

    yield start
    for command in started:  # workers die with their launcher
        command.process.kill()
        command.process.wait()


@pytest.fixture
def launch(start, directory):
    """`launch(backend, script, *words)` starts a script on two workers, in the run `directory`."""

    def launch(backend, script, *words):
        options = ["--no-live", "--workers", 2, "--run", directory]
        return start(backend, "-m", "springline.cli", "run", *options, script, *words)

    return launch


@pytest.fixture
def run(directory):
    """The run of `launch`."""
    return RunOnDisk(directory)


collect_ignore_glob = ["keras_*.py"]  # scripts, each for a process with a backend of its own
