"""The demo, run as a user runs it: a command, without a terminal."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from springline import SharedCenter
from springline.center.memory_file import TMPFS

SCRIPT = Path(__file__).parents[2] / "examples" / "numpy_workers.py"
TITLES = {"elastic": "elastic averaging", "average": "model averaging", "agn": "AGN"}
COLORS = [(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)]


def demo(*arguments, cwd):
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def endless(tmp_path):
    """A demo that trains under the first rule for ever; its output has begun."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--steps", "1000000000", "--out", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ctrl-C works, even if whoever runs the tests ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline().startswith("elastic averaging: ")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def workers_of(process):
    """The process ids of its workers, by rank: in the order in which they were started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 3
    return [int(pid) for pid in workers]


def rows_of(output):
    """The table's rows: rule → accuracy, exchanges, bytes exchanged, milliseconds per exchange."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def memory_left(tmp_path):
    """Memory in the tmpfs of centers below `tmp_path`."""
    left = []
    for owner in TMPFS.glob("springline-*/run"):
        with contextlib.suppress(OSError):
            left += [owner] if owner.read_text().startswith(str(tmp_path)) else []
    return left


def check_ended(process, workers, tmp_path):
    """Nobody works any more, and nothing but the run directory is left."""
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert memory_left(tmp_path) == []
    assert list((tmp_path / "run").iterdir()) == []


def test_all_three_rules_reach_95_percent(tmp_path):
    run = tmp_path / "run"
    result = demo("--steps", 12_000, "--period", 3, "--out", run, cwd=tmp_path)
    assert result.returncode == 0, result.stderr

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    _, test = train_test_split(np.arange(1797), test_size=360, stratify=labels, random_state=0)
    rows = rows_of(result.stdout)
    assert list(rows) == list(TITLES.values())
    for rule, title in TITLES.items():
        accuracy, exchanges, nbytes, milliseconds = rows[title]
        center = load_file(run / f"center-{rule}.safetensors")
        assert {name: array.shape for name, array in center.items()} == {
            "weight": (64, 10),
            "bias": (10,),
        }
        guesses = (images[test] @ center["weight"] + center["bias"]).argmax(axis=1)
        measured = (guesses == labels[test]).mean()
        assert measured >= 0.95
        assert accuracy == f"{measured:.1%}"
        assert exchanges == "12,000"  # 3 workers × 12,000 steps / 3
        assert nbytes == "63.0 MB"  # × 2 ways × 2,624 bytes
        assert float(milliseconds) > 0

    assert result.stdout.splitlines()[-1] == f"The centers and plot.png are in {run}"
    centers = {f"center-{rule}.safetensors" for rule in TITLES}
    assert {path.name for path in run.iterdir()} == centers | {"plot.png"}
    assert memory_left(tmp_path) == []

    pixels = np.asarray(Image.open(run / "plot.png").convert("RGB"))
    assert pixels.shape == (720, 1200, 3)
    for color in COLORS:
        assert (pixels == color).all(axis=2).sum() > 100, f"no line of color {color}"


def test_makes_a_run_directory(tmp_path):
    result = demo("--workers", 1, "--steps", 20, "--period", 7, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}-\d{6}", run.name)
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert (run / "plot.png").exists()
    assert f"are in {run.relative_to(tmp_path)}" in result.stdout
    assert [row[1] for row in rows_of(result.stdout).values()] == ["3"] * 3  # 7, 14, and the rest


@pytest.mark.parametrize("option", ["--workers", "--period", "--steps"])
def test_refuses_less_than_one(option, tmp_path):
    result = demo(option, 0, "--out", tmp_path / "run", cwd=tmp_path)
    assert result.returncode == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_leaves_a_directory_in_use_alone(tmp_path):
    (tmp_path / "precious").touch()
    tmp_path.chmod(0o755)
    result = demo("--out", ".", cwd=tmp_path)
    assert result.returncode == 2
    assert "is not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    result = demo("--out", "file", cwd=tmp_path)
    assert result.returncode == 1
    assert "File exists: 'file'" in result.stderr
    assert "Traceback" not in result.stderr


def test_names_a_worker_that_is_killed(endless, tmp_path):
    workers = workers_of(endless)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = endless.communicate()
    assert endless.returncode == 1
    assert errors == "Stopped. Worker 1 was killed by SIGKILL.\n"
    check_ended(endless, workers, tmp_path)


def test_shows_why_a_worker_failed(endless, tmp_path):
    workers = workers_of(endless)
    (directory,) = (tmp_path / "run").glob("elastic-*")
    with SharedCenter.open(directory) as center:
        center.memory.center.view(np.float32)[:] = np.nan
    _, errors = endless.communicate()
    assert endless.returncode == 1
    assert re.match(r"Stopped\. Worker [012] failed:\nTraceback", errors)
    assert "NonFiniteError" in errors
    check_ended(endless, workers, tmp_path)


def test_ctrl_c(endless, tmp_path):
    workers = workers_of(endless)
    os.killpg(endless.pid, signal.SIGINT)  # as a terminal does: to all of them
    output, errors = endless.communicate()
    assert endless.returncode == 130
    assert errors == ""
    assert output.splitlines()[-1].startswith("Stopped.")
    check_ended(endless, workers, tmp_path)
