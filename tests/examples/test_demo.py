"""What `make demo` runs, with a small model; and the recording of a killed worker."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
MODEL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--lr", "1e-2"]


def run(script, *arguments, cwd):
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_worker_is_killed_and_both_losses_are_compared(tmp_path):
    output = run("examples/demo.py", "--steps", 300, *MODEL, cwd=tmp_path)

    assert "Worker 1 was killed by SIGKILL; restart 1 of 3." in output
    two = re.search(r"two workers, DiLoCo\D+([\d.]+)\D+([\d,]+) B\D+(\d+)", output)
    one = re.search(r"one process \(DDP\)\D+([\d.]+)\D+([\d,]+) B\D+(\d+)", output)
    assert float(two[1]) == pytest.approx(float(one[1]), abs=0.3)
    assert int(two[2].replace(",", "")) < int(one[2].replace(",", "")) / 5
    assert (two[3], one[3]) == ("1", "0")
    (picture,) = tmp_path.glob("runs/*-two-workers/demo.png")
    with Image.open(picture) as image:
        assert image.width > 500


@pytest.mark.slow
def test_a_recording_ends_with_all_workers_finished(tmp_path):
    path = tmp_path / "kill.svg"
    run(
        "benchmarks/recording.py",
        "--steps",
        60,
        "--kill-at",
        20,
        "--out",
        path,
        *MODEL,
        cwd=tmp_path,
    )

    texts = [
        "".join(text.itertext()) for text in ElementTree.parse(path).iter() if "text" in text.tag
    ]
    assert any(text.startswith("$ kill -9 ") for text in texts)
    assert any("↻ restarting" in text for text in texts)
    assert sum("✓ finished" in text for text in texts[-40:]) == 3
