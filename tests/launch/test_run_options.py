"""Options of `springline run`: what is run, with which first values, how often it is restarted."""

import os
import pty
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.launched import wait_for
from springline import __version__

# Every worker begins elsewhere, loads something after it has joined, and adds 1 in each step.
BEGINS = """
import numpy as np, springline
from springline.run import Run
run = Run.from_environment()
rule = springline.ModelAverage(period=2, workers=run.workers)
given = {"w": np.full(3, 100.0 + run.rank, np.float32), "b": np.zeros((2, 2), np.float32)}
with springline.Worker(given, rule, center=run.center_directory, rank=run.rank) as worker:
    worker.parameters["w"] += 1000
    worker.begin()
    print("begins with", worker.parameters["w"].tolist())
    for step in springline.steps(4):
        worker.parameters["w"] += 1
        worker.step()
"""
FITS = {"w": np.full(3, 5, np.float32), "b": np.ones((2, 2), np.float16)}


@pytest.mark.parametrize("words", [["-m", "springline"], ["-m", "springline.cli"]])
def test_the_version_is_printed(words):
    said = subprocess.run(
        [sys.executable, *words, "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout == f"springline {__version__}\n"


def test_help_names_the_command_and_every_option():
    words = [sys.executable, "-m", "springline", "run", "--help"]
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
    said = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert "Usage: springline run [OPTIONS]" in said.stdout
    for option in ("-m", "--from", "--restart-window", "--max-restarts", "--yes"):
        assert re.search(rf"{option}\b", said.stdout), option


@pytest.mark.parametrize("name", ["package.inner", "package"])
def test_a_module_is_run_as_python_runs_it(command, script, tmp_path, name):
    (tmp_path / "package").mkdir()
    script("raise SystemExit('the launcher imports nothing')", "package/__init__.py").write_text(
        "import os\nassert 'PYTHONUNBUFFERED' in os.environ, 'imported by the launcher'\n"
    )
    text = "import sys\nfrom . import os\nprint('ran', __name__, sys.argv[1:], sys.path[0])\n"
    script(text, "package/inner.py")
    script(text, "package/__main__.py")
    words = ["--run", "run", "--workers", 1, "-m", name, "--workers", "7", "-m"]
    ran = command("run", *words)
    assert ran.process.returncode == 0, ran.output
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"ran __main__ ['--workers', '7', '-m'] {tmp_path}\n" in log


def test_a_new_run_begins_with_a_file(command, script, run, tmp_path):
    save_file(FITS, tmp_path / "first.safetensors")
    words = ["--workers", 2, "--run", run.path]
    ran = command("run", *words, "--from", "first.safetensors", script(BEGINS))
    assert ran.process.returncode == 0, ran.output
    for rank in range(2):
        assert "begins with [5.0, 5.0, 5.0]" in run.log(rank)
    center = load_file(run.path / "center.safetensors")
    assert center["w"].tolist() == [9, 9, 9]
    assert center["b"].tolist() == [[1, 1], [1, 1]]

    refused = command("run", *words, "--from", "first.safetensors", script(BEGINS))
    assert refused.process.returncode == 2
    assert "has a center, with which it goes on. Received: --from first" in refused.output
    longer = command("run", *words, script(BEGINS.replace("steps(4)", "steps(6)")))
    assert longer.process.returncode == 0, longer.output
    assert load_file(run.path / "center.safetensors")["w"].tolist() == [11, 11, 11]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"w": None}, "'w' is missing"),
        ({"c": np.zeros(1)}, "'c' is not in the model"),
        ({"w": np.zeros(4)}, "'w' has shape (4,), in the model (3,)"),
        ({"b": np.zeros((2, 2), int)}, "'b' has dtype I64, in the model float32"),
        ({"w": np.full(3, np.nan)}, "has NaN or Inf in 'w'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_any_work(
    command, script, run, tmp_path, change, sentence
):
    values = {name: v for name, v in (FITS | change).items() if v is not None}
    save_file(values, tmp_path / "first.safetensors")
    words = ["--workers", 2, "--run", run.path, "--from", "first.safetensors"]
    refused = command("run", *words, script(BEGINS))
    assert refused.process.returncode == 1
    assert sentence in refused.output
    assert "No center was made yet" in refused.output
    assert [worker.restarts for worker in run.state.workers] == [0, 0]
    save_file(FITS, tmp_path / "first.safetensors")
    assert command("run", *words, script(BEGINS)).process.returncode == 0


DIES = """
import os, pathlib
mark = pathlib.Path("deaths")
mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
if len(mark.read_text()) < 5:
    os.abort()
"""


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--max-restarts", 1], 1),
        (["--max-restarts", 1, "--restart-window", 0.001], 0),
        (["--max-restarts", -1], 0),
    ],
)
def test_old_restarts_do_not_count(command, script, run, options, status):
    ran = command("run", "--workers", 1, "--run", run.path, *options, script(DIES))
    assert ran.process.returncode == status, ran.output
    assert run.worker(0).restarts == (1 if status else 4)
    assert ran.output.count("Worker 0 was killed by SIGABRT; restart 1") == (
        4 if "--restart-window" in options else 1
    )


def test_a_run_goes_on_with_another_script_only_if_that_is_meant(command, script, run, tmp_path):
    words = ["--workers", 1, "--run", run.path]
    first, second = script(BEGINS, "first.py"), script(BEGINS, "second.py")
    assert command("run", *words, first).process.returncode == 0
    before = (run.path / "launch.json").read_text()
    refused = command("run", *words, second)
    assert refused.process.returncode == 2
    assert f"was started with {first}. Received: {second}" in refused.output
    assert "give `--yes`" in refused.output
    assert (run.path / "launch.json").read_text() == before
    assert command("run", *words, "--yes", second).process.returncode == 0
    assert run.state.script == str(second)

    (tmp_path / "moved").mkdir()
    moved = second.rename(tmp_path / "moved" / "second.py")
    assert command("run", *words, moved).process.returncode == 0


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 2)])
def test_on_a_terminal_it_asks(command, script, run, answer, status):
    words = ["run", "--no-live", "--workers", "1", "--run", str(run.path)]
    assert command(*words, script(BEGINS, "first.py")).process.returncode == 0
    second = script(BEGINS, "second.py")
    ours, theirs = pty.openpty()
    python = [sys.executable, "-m", "springline", *words, str(second)]
    process = subprocess.Popen(python, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
    except OSError:  # the other end is closed
        os.close(ours)
    assert process.wait(60) == status
    assert f"Go on with {second}? [y/N]".encode() in b"".join(said.split(b"\r\n"))


MISTAKES = {
    "a setting": ("springline.ModelAverage(period=0, workers=2)", "`period` must be"),
    "another rule than the center's": (
        "springline.Worker({'w': np.zeros(3)}, springline.ElasticAverage(period=2 + run.rank, "
        "workers=2), center=run.center_directory, rank=run.rank); time.sleep(60)",
        "period=",
    ),
    "a count": ("springline.steps(-1)", "`n` must be an integer >= 0"),
    "finish() before the last step": (
        "worker = springline.Worker({'w': np.zeros(3)}, springline.ElasticAverage(period=1, "
        "workers=2), center=run.center_directory, rank=run.rank)\n"
        "worker.step(); worker.finish(); worker.step()",
        "called before its last step",
    ),
}
IMPORTS = "import time, numpy as np, springline\nrun = springline.run.Run.from_environment()\n"


@pytest.mark.parametrize("which", MISTAKES)
def test_a_mistake_ends_the_run_at_once(command, script, run, which):
    line, sentence = MISTAKES[which]
    ended = command("run", "--workers", 2, "--run", run.path, script(f"{IMPORTS}{line}\n"))
    assert ended.process.returncode == 1, ended.output
    assert "after an error that no restart fixes: the run ends." in ended.output
    assert sentence in ended.output
    assert "Traceback" in ended.output
    assert "restart 1" not in ended.output
    assert [worker.restarts for worker in run.state.workers] == [0, 0]


@pytest.mark.parametrize(
    "line",
    [
        "raise ValueError('the script is its own')",
        "raise springline.RankError('it may be free the next time')",
        "sorted([1, 'a'])",
        "worker = springline.Worker({'w': np.zeros(3)}, springline.ElasticAverage(period=2), "
        "rank=0)\nworker.step()\nspringline.steps(-1)",
    ],
)
def test_other_errors_are_restarted(command, script, run, line):
    words = ["--workers", 1, "--max-restarts", 1, "--run", run.path]
    ended = command("run", *words, script(f"{IMPORTS}{line}\n"))
    assert ended.process.returncode == 1
    assert "Worker 0 ended with status 1; restart 1 of 1" in ended.output


def test_without_a_limit_an_error_may_recur(start_command, script, run):
    path = script("import nothing_of_that_name\n")
    running = start_command("run", "--max-restarts", -1, "--workers", 1, "--run", run.path, path)
    wait_for(lambda: run.state and run.worker(0).restarts > 2)
    running.process.send_signal(signal.SIGINT)
    assert running.wait(30) == 128 + signal.SIGINT, running.output


def test_alone_a_mistake_ends_with_the_usual_status(script):
    path = script("import springline\nspringline.steps(-1)\n")
    assert subprocess.run([sys.executable, path], check=False, stderr=-3).returncode == 1
