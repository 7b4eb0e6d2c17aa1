"""`springline ls` and `clean`: what runs hold, and what of it nobody uses."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from launched import TRAINING, RunOnDisk, all_gone, wait_for

from springline import ElasticAverage, SharedCenter
from springline.center import Layout, memory_file
from springline.center.checkpoint import describe
from springline.center.locks import CREATE
from springline.center.segments import segments

pytestmark = pytest.mark.usefixtures("own_tmpfs")
VALUES = {"v": np.zeros(1 << 16, np.float32)}
RULE = ElasticAverage(workers=2, period=1, moving_rate=0.5)


def create(directory):
    return SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs").mkdir()
    return RunOnDisk(tmp_path / "runs" / "one")


@pytest.fixture
def killed(train, run):
    """A run whose launcher was killed, workers and all: its center is in memory."""
    train("elastic", 10_000, 0.01).send(wait_for(lambda: run.at_work(10)) and signal.SIGKILL)
    wait_for(lambda: all_gone(run.running(rank) for rank in range(3)))
    return run


def row_of(listed, run):
    """The cells of a run's line, without those that change."""
    (line,) = [line for line in listed.output.splitlines() if line.startswith(str(run))]
    name, workers, version, *_, state = re.split("  +", line)
    return name, workers, version, state


def test_nothing_is_said_so(command, tmp_path):
    listed = command("ls")
    assert listed.process.returncode == 0
    assert "There are no runs in runs" in listed.output
    assert "springline run SCRIPT" in listed.output
    cleaned = command("clean")
    assert (cleaned.process.returncode, cleaned.output) == (0, "There is nothing to free.\n")
    for words in (["ls", "nowhere"], ["clean", "nowhere", "--yes"]):
        refused = command(*words)
        assert refused.process.returncode == 2
        assert "There is no directory nowhere" in refused.output


def test_a_run_that_goes_on_is_listed_and_left_alone(train, command, run, own_tmpfs):
    going = train("elastic", 100_000, 0.02)  # until it is stopped
    wait_for(lambda: run.at_work(10))
    version = row_of(command("ls"), "runs/one")[2]
    assert int(version.replace(",", "")) >= 15
    assert row_of(command("ls"), "runs/one")[::3] == ("runs/one", "running")
    cleaned = command("clean", "--yes")
    assert "There is nothing to free." in cleaned.output
    assert len(list(own_tmpfs.iterdir())) == 1
    (run.path / "stop").touch()
    assert going.wait() == 0, going.output
    final = describe(run.path / "center" / "checkpoint.safetensors").version
    assert row_of(command("ls"), "runs/one") == ("runs/one", "3", str(final), "finished")
    assert list(own_tmpfs.iterdir()) == []


def test_the_center_of_a_killed_run_is_saved_and_its_memory_freed(killed, command, own_tmpfs):
    reached = killed.steps()
    with SharedCenter.open(killed.path / "center") as center:
        version = str(center.version)
    del center  # which maps the memory
    listed = command("ls")
    assert row_of(listed, "runs/one") == ("runs/one", "3", version, "stopped")
    assert "see `springline clean`" in listed.output
    shown = command("clean")
    assert shown.process.returncode == 1
    assert "runs/one/center: the center in memory, saved as" in shown.output
    assert "Nothing is freed yet. To free this: springline clean runs --yes" in shown.output
    assert len(list(own_tmpfs.iterdir())) == 1

    cleaned = command("clean", "--yes")
    assert cleaned.process.returncode == 0, cleaned.output
    assert re.search(r"[1-9][\d.]* kB freed", cleaned.output)
    assert list(own_tmpfs.iterdir()) == []
    assert row_of(command("ls"), "runs/one") == ("runs/one", "3", version, "stopped")
    assert killed.steps() == reached
    on = command("run", "--run", killed.path, TRAINING, "elastic", max(reached) + 10, 0)
    assert on.process.returncode == 0, on.output
    assert killed.steps() == [max(reached) + 10] * 3


def test_memory_of_a_run_that_is_gone_is_listed_and_freed(killed, command, tmp_path, own_tmpfs):
    moved = killed.path.rename(tmp_path / "runs" / "moved")
    cleaned = command("clean")
    assert "runs/moved/center: the center in memory" in cleaned.output  # not lost, for it was moved
    elsewhere = command("ls", own_tmpfs)
    assert row_of(elsewhere, "runs/moved")[3] == "stopped"
    shutil.rmtree(moved)
    assert row_of(command("ls"), "runs/one") == ("runs/one", "-", "-", "gone")
    cleaned = command("clean", "--yes")
    assert cleaned.process.returncode == 0
    assert "the memory of runs/one, which is gone" in cleaned.output
    assert list(own_tmpfs.iterdir()) == []


def test_what_killed_processes_left_is_freed_and_nothing_else(command, tmp_path, own_tmpfs):
    center = tmp_path / "runs" / "digits"
    with create(center) as made:
        made.save()
        made.retire()
    temporary = center / ".checkpoint.safetensors.0123456789abcdef.springline"
    empty, half = own_tmpfs / "springline-abcdefgh", own_tmpfs / "springline-abcdefgi"
    empty.mkdir()
    half.mkdir()
    ours = [temporary, half / "center.memory", half / "identity"]
    precious = tmp_path / "precious"
    precious.mkdir()
    theirs = [precious / name for name in ("center.memory", "run", "identity")]
    theirs += [own_tmpfs / name for name in ("springline-abcdefgj", "springline-other", "other")]
    (own_tmpfs / "springline-abcdefgk").mkdir()
    theirs += [own_tmpfs / "springline-abcdefgk" / "mine", center / ".springline"]
    theirs += [center / ".env.springline", center / "notes.0123456789abcdef.springline"]
    for path in [*ours, *theirs]:
        path.write_bytes(bytes(10_000))
    (own_tmpfs / "springline-abcdefgl").symlink_to(precious)
    (center / ".x.0123456789abcdef.springline").symlink_to(precious / "run")
    before = {path for path in tmp_path.rglob("*") if not path.name.startswith("output-")}
    cleaned = command("clean", "--yes")
    after = {path for path in tmp_path.rglob("*") if not path.name.startswith("output-")}
    assert before - after == {empty, half, *ours}
    assert cleaned.process.returncode == 1  # the link in the run is reported
    assert "Not freed" in cleaned.output
    (center / ".x.0123456789abcdef.springline").unlink()
    assert command("clean", "--yes").output == "There is nothing to free.\n"
    assert row_of(command("ls"), "runs/digits") == ("runs/digits", "2", "0", "ended")


def test_one_damaged_run_does_not_hide_the_others(command, tmp_path, own_tmpfs):
    for name in ("a", "b", "c", "good"):
        create(tmp_path / "runs" / name / "center").retire()
    (tmp_path / "runs" / "a" / "center" / "layout.json").write_text("{")
    (tmp_path / "runs" / "b" / "launch.json").write_text('{"workers": 3}')
    (tmp_path / "runs" / "c" / "center" / "checkpoint.safetensors").write_bytes(b"nothing")
    listed = command("ls")
    assert listed.process.returncode == 0
    for name in ("a", "b", "c"):
        assert row_of(listed, f"runs/{name}")[3].startswith("damaged: "), listed.output
    assert row_of(listed, "runs/good") == ("runs/good", "2", "0", "ended")
    assert "There is nothing to free." in command("clean", "--yes").output
    (tmp_path / "runs" / "b" / "launch.json").unlink()  # the clean-up of this test reads it


def test_a_center_that_cannot_be_saved_stays(command, tmp_path, own_tmpfs):
    center = tmp_path / "runs" / "one" / "center"
    create(center).close()
    (center / "checkpoint.safetensors").mkdir()
    cleaned = command("clean", "--yes")
    assert cleaned.process.returncode == 1
    assert "Not freed: Could not write" in cleaned.output
    assert "0 bytes freed" in cleaned.output
    assert len(list(own_tmpfs.iterdir())) == 1


def hold(pipe, tmpfs, directory):
    memory_file.TMPFS = tmpfs
    with create(directory) as center, center.locks.acquire(CREATE):
        pipe.send("held")
        os.kill(os.getpid(), signal.SIGSTOP)


def test_nobody_waits_for_a_stopped_process(command, start, tmp_path, own_tmpfs):
    process, pipe = start(hold, own_tmpfs, tmp_path / "runs" / "one" / "center")
    assert pipe.recv() == "held"
    assert row_of(command("ls"), "runs/one")[1:3] == ("2", "0")
    assert command("clean", "--yes").output == "There is nothing to free.\n"
    process.kill()
    process.join()
    assert command("clean", "--yes").process.returncode == 0
    assert list(own_tmpfs.iterdir()) == []


def test_what_is_another_users_is_not_seen(tmp_path, own_tmpfs, monkeypatch):
    create(tmp_path / "run").close()
    assert len(list(segments())) == 1
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert list(segments()) == []


@pytest.mark.parametrize("answer", ["y", "n"])
def test_clean_asks_in_a_terminal(command, tmp_path, own_tmpfs, answer):
    create(tmp_path / "runs" / "one" / "center").close()
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "springline.cli", "clean"]
    paths = [str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        words, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == (answer == "n"), shown
    assert b"Free " in shown
    assert (list(own_tmpfs.iterdir()) == []) == (answer == "y")
