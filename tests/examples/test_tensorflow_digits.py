"""The TensorFlow example: alone, and on a cluster of real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from springline.monitor.metrics import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorflow_digits.py"
STEPS = 1000


def private():
    """Words before a command: TensorFlow's servers listen everywhere, here on a loopback alone."""
    asked = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    shell = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return [] if asked.returncode else ["unshare", "-n", *shell]


def accuracy(*words, rule):
    """Run a command; return what it says of the center, and all it says."""
    ended = subprocess.run(
        [*words, str(EXAMPLE), "--rule", rule, "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = re.findall(rf"Accuracy of the center under {rule}: ([\d.]+)%", ended.stdout)
    return float(found), ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["elastic", "average", "agn"])
def test_two_workers_are_within_a_point_of_one(rule, tmp_path):
    one, _ = accuracy(sys.executable, rule=rule)
    launch = [sys.executable, "-m", "springline.cli", "run", "--no-live", "--ps", "1"]
    launch += ["--workers", "2", "--run", str(tmp_path / "run")]
    two, said = accuracy(*private(), *launch, rule=rule)
    assert one > 90
    assert two >= one - 1
    assert "on 2 workers and 1 parameter server" in said
    metrics = read_metrics(tmp_path / "run")
    made = [metrics[rank].step[-1] for rank in (0, 1)]
    assert min(made) > 0  # both took part
    assert sum(made) == pytest.approx(2 * STEPS, abs=20)  # a period of each
