"""The real command, in real processes, each with a deadline."""

import os
import shutil
import subprocess
import sys
from itertools import count

import pytest
from launched import TRAINING, Command, RunOnDisk, alive, wait_for

from springline.center import memory_file
from springline.launch_state import LaunchState


@pytest.fixture
def start_command(tmp_path):
    """`start_command(*words)` starts `springline` with these words, in `tmp_path`."""
    started, numbers = [], count()
    # Without matplotlib, whose import takes longer than most of these runs.
    (tmp_path / "without" / "matplotlib").mkdir(parents=True)
    without = tmp_path / "without" / "matplotlib" / "__init__.py"
    without.write_text("raise ImportError('matplotlib is not here')")

    def surroundings(changes):
        paths = filter(None, [str(tmp_path / "without"), os.environ.get("PYTHONPATH")])
        environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(paths)}
        environment |= changes
        return {name: value for name, value in environment.items() if value is not None}

    def start_command(*words, driver=("-m", "springline.cli"), environment=None):
        output = tmp_path / f"output-{next(numbers)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *driver, *map(str, words)],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=surroundings(environment or {}),
            )
        command = Command(process, output)
        started.append(command)
        return command

    yield start_command
    for command in started:  # workers die with their launcher
        command.process.kill()
        command.process.wait()
    for state in (LaunchState.read(path.parent) for path in tmp_path.rglob("launch.json")):
        for pid in [worker.pid for worker in state.workers if worker.pid]:
            wait_for(lambda pid=pid: not alive(pid))
    for home in memory_file.TMPFS.glob("springline-*"):
        owner = home / "run"
        if owner.exists() and owner.read_text().startswith(f"{tmp_path}/"):
            shutil.rmtree(home, ignore_errors=True)  # another test may sweep it just now


@pytest.fixture
def command(start_command):
    """`command(*words)` runs `springline` with these words to its end."""

    def command(*words, **options):
        started = start_command(*words, **options)
        started.wait()
        return started

    return command


@pytest.fixture
def run(tmp_path):
    """A run's directory that is not there yet."""
    return RunOnDisk(tmp_path / "run")


@pytest.fixture
def own_tmpfs(tmp_path, tmpfs, start_command):
    """A tmpfs of our own, for this process and for all that `start_command` starts."""
    text = (
        "from springline.center import memory_file as file\n"
        f"file.TMPFS = type(file.TMPFS)({str(tmpfs)!r})\n"
    )
    (tmp_path / "without" / "sitecustomize.py").write_text(text)
    return tmpfs


@pytest.fixture
def train(start_command, run):
    """`train(rule, steps, pause)` starts the training script on three workers."""

    def train(rule="elastic", steps=20, pause=0.0, *options, at=run, **more):
        words = ["run", "--workers", 3, "--run", at.path, *options, TRAINING, rule, steps, pause]
        return start_command(*words, **more)

    return train


@pytest.fixture
def script(tmp_path):
    """`script(text)` writes a worker's script."""

    def script(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return script
