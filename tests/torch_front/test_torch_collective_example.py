"""The example for `torchrun`: two ranks learn to read digits."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from test_torch_collective import private, torchrun

from marks import slow
from springline.center import checkpoint
from springline.monitor.metrics import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_digits.py"
STEPS = 300


@pytest.mark.parametrize("rule", slow("average", "elastic"))
def test_two_ranks_learn_digits(rule, tmp_path):
    environment = os.environ | {
        "SPRINGLINE_RUN": str(tmp_path / "run"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    words = torchrun("--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--rule", rule)
    ended = subprocess.run(
        [*private(), *words, "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = re.findall(rf"Accuracy of the center under {rule}: ([\d.]+)%", ended.stdout)
    assert float(found) > 90
    saved = checkpoint.describe(tmp_path / "run" / "center" / "checkpoint.safetensors")
    assert (saved.version, saved.steps) == (STEPS // 10, [STEPS] * 2)
    metrics = read_metrics(tmp_path / "run")
    assert [metrics[rank].step[-1] for rank in (0, 1)] == [STEPS] * 2
