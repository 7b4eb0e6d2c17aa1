"""Real processes for the tests of integrations."""

import os
import subprocess
import sys

LAUNCH = ["-m", "springline.cli", "run", "--no-live", "--workers", 2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone"]


def python(folder, *words, fails=False):
    """Run Python with these words in a folder; return what it prints."""
    ran = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ran.returncode != 0) == fails, ran.stdout
    return ran.stdout
