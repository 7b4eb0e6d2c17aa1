"""The TensorFlow example without a graph: alone, and on two workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from springline.center.checkpoint import describe

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorflow_eager.py"


def accuracy(*words, steps, cwd):
    """Run a command; return what it says of the model."""
    ended = subprocess.run(
        [sys.executable, *words, str(EXAMPLE), "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = re.findall(r"Accuracy of the center: ([\d.]+)%", ended.stdout)
    return float(found)


@pytest.mark.slow
def test_alone(tmp_path):
    assert accuracy(steps=300, cwd=tmp_path) > 90


@pytest.mark.slow
def test_two_workers_are_within_a_point_of_one(tmp_path):
    one = accuracy(steps=1000, cwd=tmp_path)
    launch = ["-m", "springline.cli", "run", "--no-live", "--workers", "2", "--run", "run"]
    assert accuracy(*launch, steps=1000, cwd=tmp_path) >= one - 1
    assert describe(tmp_path / "run" / "center" / "checkpoint.safetensors").steps == [1000, 1000]
