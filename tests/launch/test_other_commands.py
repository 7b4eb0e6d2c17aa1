"""`springline export`, `top` and `plot`, and the live screen."""

import os
import pty
import shutil
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest
from launched import TRAINING, wait_for
from safetensors.numpy import load_file

from springline.center.checkpoint import previous
from springline.launch_state import LaunchState


def test_export_of_a_live_run_and_of_one_that_has_ended(train, command, run, tmp_path):
    live = train("elastic", 1000, 0.02)
    wait_for(lambda: run.at_work(4))
    path = tmp_path / "out.safetensors"
    exported = command("export", run.path, path)
    assert exported.process.returncode == 0
    assert "from memory" in exported.output
    assert load_file(path).keys() == {"w"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    live.send(signal.SIGINT)
    live.wait(20)

    final = load_file(run.path / "center.safetensors")["w"]
    path.write_text("mine")
    refused = command("export", run.path, path)
    assert refused.process.returncode == 2
    assert "is there already" in refused.output
    assert path.read_text() == "mine"
    for gone, source in [
        (None, "center/checkpoint.safetensors"),
        ("checkpoint.safetensors", "run/center.safetensors"),
    ]:
        if gone:
            (run.path / "center" / gone).unlink()
            previous(run.path / "center" / gone).unlink(missing_ok=True)
        exported = command("export", "--force", run.path, path)
        assert exported.process.returncode == 0, exported.output
        assert source in exported.output
        np.testing.assert_array_equal(load_file(path)["w"], final)
    assert [p.name for p in tmp_path.glob(".*")] == []  # no temporary file stays


def test_commands_refuse_what_is_not_a_run(command, tmp_path):
    (tmp_path / "empty").mkdir()
    for words in (["export", "empty", "x"], ["top", "empty"], ["plot", "empty"]):
        refused = command(*words)
        assert refused.process.returncode == 2
        assert "springline: empty is not a run's directory" in refused.output
    refused = command("top", "nowhere")
    assert refused.process.returncode == 2
    assert "There is no run in nowhere" in refused.output
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("empty", "is a directory"), ("nowhere/x", "There is no directory"), ("x", "no center yet")],
)
def test_export_says_what_is_wrong(command, script, run, tmp_path, path, sentence):
    (tmp_path / "empty").mkdir()
    run.path.mkdir()
    LaunchState("script.py", [], 0.0, 1).write(run.path)
    refused = command("export", run.path, path)
    assert refused.process.returncode == 2
    assert sentence in refused.output


def test_top_shows_a_run_until_it_ends_and_plot_draws_it(train, start_command, command, run):
    train("elastic", 10_000, 0.05)  # until it is stopped
    wait_for(lambda: run.at_work(4))
    watching = start_command("top", run.path)
    once = command("top", "--once", run.path)
    assert once.process.returncode == 0
    for word in ("elastic averaging", "steps/s", "exchanges", "running", "center version"):
        assert word in once.output
    assert "\x1b" not in once.output
    wait_for(lambda: "elastic averaging" in watching.output)
    (run.path / "stop").touch()
    assert watching.wait(30) == 0
    assert "3 finished" in watching.output

    (run.path / "plot.png").unlink(missing_ok=True)
    wait_for(lambda: run.state.ended)
    drawn = command("plot", run.path, environment={"PYTHONPATH": None})
    assert drawn.process.returncode == 0, drawn.output
    assert (run.path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_top_ends_at_ctrl_c(train, start_command, run):
    live = train("elastic", 1000, 0.05)
    wait_for(lambda: run.at_work(4))
    watching = start_command("top", run.path)
    wait_for(lambda: "elastic averaging" in watching.output)
    watching.send(signal.SIGINT)
    assert watching.wait(10) == 0
    assert live.process.poll() is None


@pytest.mark.parametrize("option", ["live", "--no-live"])
def test_the_screen_in_a_terminal(run, tmp_path, option):
    ours, theirs = pty.openpty()
    words = [
        "run",
        "--run",
        run.path,
        *[option] * (option != "live"),
        TRAINING,
        "elastic",
        20,
        0.02,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "springline.cli", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
        process.kill()
    text = shown.decode()
    assert process.wait() == 0, text
    assert ("\x1b[?25l" in text) == (option == "live")  # the cursor is hidden while it is live
    assert "finished" in text
    assert "The center is in run/center.safetensors" in text
    shutil.rmtree(run.path)
