"""Workers that are copies of each other are noticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from springline.center.checkpoint import describe

SCRIPT = Path(__file__).with_name("torch_replicas.py")
SAME = "all workers hold the same parameters in every round"
WRAPPED = "The model is in DistributedDataParallel"


@pytest.mark.parametrize(
    ("how", "said", "not_said"),
    [
        ("ddp", WRAPPED, "Traceback"),
        ("same", SAME, WRAPPED),
        pytest.param("own", "trained", SAME, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_under_torchrun(tmp_path, memories, how, said, not_said):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ran = subprocess.run(
        [sys.executable, *words, str(SCRIPT), how],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    assert output.count(said) == 2  # once per rank
    assert not_said not in output
    (saved,) = tmp_path.glob("runs/torchrun-*/center/checkpoint.safetensors")
    assert describe(saved).version == 8  # the last to end has saved the center and freed its memory
    assert memories(tmp_path) == []
    assert "stays in memory" not in output
