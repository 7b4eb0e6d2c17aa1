"""`springline run`: what it starts, what it leaves, what it refuses."""

import json
import os
import re
import stat
import subprocess
import sys
import time

import pytest
from launched import TRAINING, alive, wait_for
from safetensors.numpy import load_file

from springline.launch import guard
from springline.launch.directory import LaunchError, RunDirectory
from springline.launch.process import cores
from springline.launch_state import Asked, LaunchState


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_all_workers_finish_and_the_center_is_a_file(train, run):
    command = train("elastic", 30, environment={"PYTHONPATH": None})
    assert command.wait() == 0
    assert run.steps() == [30, 30, 30]
    center = load_file(run.path / "center.safetensors")
    assert center.keys() == {"w"}
    assert center["w"].shape == (100,)
    assert (center["w"] > 0).all()
    assert [w.state for w in run.state.workers] == ["finished"] * 3
    assert run.state.checkpoint
    assert run.state.ended >= run.state.started
    assert (run.path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "The center is in run/center.safetensors" in command.output
    assert "run/plot.png" in command.output
    assert run.memory() == []
    assert mode(run.path) == mode(run.path / "logs") == 0o700
    assert mode(run.path / "center.safetensors") == mode(run.path / "logs" / "rank-0.log") == 0o600


THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TELL = """
import json, os, sys
world = {"argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
         "spec": __spec__, "loader": type(__loader__).__name__, "cwd": os.getcwd(),
         "modules": sorted(m for m in sys.modules if m.split(".")[0] in ("numpy", "springline"))}
if "SPRINGLINE_RANK" in os.environ:
    world["session"] = os.getsid(0) == os.getpid()
    world["input"] = sys.stdin.read()
    world["environment"] = dict(os.environ)
with open(f"told-{os.environ.get('SPRINGLINE_RANK')}.json", "w") as file:
    json.dump(world, file)
"""


def test_a_worker_is_what_python_alone_would_run(command, script, tmp_path):
    (tmp_path / "below").mkdir()
    script(TELL, "below/tell.py")
    words = ["below/tell.py", "-x", "--workers", "7", "--run", "a b", "--help", "--", "-", ""]
    environment = {"PYTHONPATH": "somewhere"}
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, env=os.environ | environment)
    alone = json.loads((tmp_path / "told-None.json").read_text())

    environment |= dict.fromkeys(THREADS) | {"MKL_NUM_THREADS": "9", "MALLOC_ARENA_MAX": "5"}
    ran = command("run", *words, environment=environment)
    assert ran.process.returncode == 0, ran.output
    assert "No center was made" in ran.output
    workers = max(2, cores())
    told = sorted(tmp_path.glob("told-[0-9]*.json"))
    assert len(told) == workers
    (directory,) = (tmp_path / "runs").iterdir()
    assert mode(directory) == 0o700
    for rank in range(workers):
        world = json.loads((tmp_path / f"told-{rank}.json").read_text())
        environment = world.pop("environment")
        assert world.pop("session")
        assert world.pop("input") == ""
        assert world == alone
        ours = {k: v for k, v in environment.items() if k.startswith("SPRINGLINE_")}
        assert ours == {
            "SPRINGLINE_RUN": str(directory),
            "SPRINGLINE_RANK": str(rank),
            "SPRINGLINE_WORKERS": str(workers),
        }
        assert environment["PYTHONUNBUFFERED"] == "1"
        share = str(max(1, cores() // workers))
        assert [environment[name] for name in THREADS] == [share, share, "9"]  # the user's own
        assert environment["MALLOC_ARENA_MAX"] == "5"
        assert environment["MALLOC_MMAP_MAX_"] == "0"
        assert environment["MALLOC_TRIM_THRESHOLD_"] == "9999999999"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "There is no script nowhere.py."),
        (["."], "must be a Python file"),
        (["--workers", "0", TRAINING], "`--workers` must be an integer >= 1. Received: 0."),
        (["--max-restarts", "-2", TRAINING], "`--max-restarts` must be an integer >= 0, or -1"),
        (["--restart-window", "0", TRAINING], "`--restart-window` must be seconds > 0"),
        (["-m", "no.such.module"], "There is no module no.such.module that `python -m"),
        (["-m", "mine"], "There is no module mine that `python -m mine` could run"),
        (["--from", "none.safetensors", TRAINING], "`--from` must be a safetensors file"),
        (["--from", TRAINING, TRAINING], "`--from` must be a safetensors file"),
        (["--from", "x", "--ps", "1", TRAINING], "`--from` is for a center on this machine"),
        (["--from", "x", "--address", "auto", TRAINING], "`--from` is for a center on this mach"),
        (["--run", TRAINING, TRAINING], "`--run` must be a directory"),
        (["--run", "mine", TRAINING], "is not a run's directory: it holds 'thesis.tex'"),
        (["--wrokers", "3", TRAINING], "No such option"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(command, tmp_path, words, sentence):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    before = sorted(p for p in tmp_path.rglob("*") if "output" not in p.name)
    refused = command("run", *words)
    assert refused.process.returncode == 2
    assert sentence in refused.output
    assert "Traceback" not in refused.output
    assert sorted(p for p in tmp_path.rglob("*") if "output" not in p.name) == before


def test_two_runs_that_start_in_one_second_have_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-01-000000")
    places = [RunDirectory(None), RunDirectory(None)]
    assert [p.path.name for p in places] == ["2026-01-01-000000", "2026-01-01-000000-2"]
    assert [mode(p.path) for p in places] == [0o700, 0o700]
    for place in places:
        place.release()


def test_a_second_launcher_is_refused_while_the_first_is_at_work(train, command, run):
    first = train("elastic", 1000, 0.05)
    wait_for(run.at_work)
    second = command("run", "--run", run.path, TRAINING, "elastic", 10, 0)
    assert second.process.returncode == 2
    assert "A run is going on in" in second.output
    assert first.process.poll() is None
    assert all(alive(worker.pid) for worker in run.state.workers)
    with pytest.raises(LaunchError, match="A run is going on"):
        RunDirectory(run.path)


def test_a_finished_run_goes_on(train, command, run):
    assert train("average", 10).wait() == 0
    longer = command("run", "--run", run.path, TRAINING, "average", 30, 0)
    assert longer.process.returncode == 0
    assert f"Going on with the run in {run.path.name}" in longer.output
    assert "on 3 workers" in longer.output  # as many as it had
    assert run.steps() == [30, 30, 30]
    assert re.findall(r"start \d+", run.log(0)) == ["start 1", "start 2"]
    ((started, ended),) = run.state.earlier
    assert started < ended < run.state.started
    assert [len(worker.starts) for worker in run.state.workers] == [2, 2, 2]
    assert [worker.restarts for worker in run.state.workers] == [0, 0, 0]
    refused = command("run", "--run", run.path, "--workers", 2, TRAINING, "average", 40, 0)
    assert refused.process.returncode == 2
    assert "has 3 workers, which is fixed. Received: --workers 2" in refused.output


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def f(:\n", ['  File "{path}", line 1', "    def f(:", "SyntaxError: invalid syntax"]),
        (
            "import nothing_of_that_name\n",
            [
                "Traceback (most recent call last):",
                '  File "{path}", line 1, in <module>',
                "    import nothing_of_that_name",
                "ModuleNotFoundError: No module named 'nothing_of_that_name'",
            ],
        ),
    ],
)
def test_a_script_that_fails_at_once_ends_the_run(command, script, run, text, lines):
    path = script(text)
    failed = command("run", "--run", run.path, "--workers", 2, "--max-restarts", 1, path)
    assert failed.process.returncode == 1
    for line in lines:
        assert f"  {line.format(path=path)}\n" in failed.output
    assert f'; restart 1 of 1. Its last line: "{lines[-1]}' in failed.output
    assert failed.output.count("Traceback") == "".join(lines).count("Traceback")
    assert "guard.py" not in failed.output  # tracebacks are the script's own
    worker = next(w for w in run.state.workers if w.state == "failed")
    assert (worker.restarts, worker.exit_code) == (1, 1)
    assert run.log(worker.rank).count("--- rank") == 2
    assert "No center was made yet, so nothing is saved." in failed.output
    assert "use springline?" not in failed.output


def test_a_worker_that_keeps_dying_ends_the_run_and_the_center_is_saved(train, run):
    command = train("elastic", 100_000, 0.01, "--max-restarts", 0)
    wait_for(lambda: run.at_work(4))
    os.kill(run.running(1), 9)
    assert command.wait() == 1
    assert "Worker 1 was killed by SIGKILL and is not restarted again" in command.output
    # A worker may see RUN/stop just before its SIGINT comes.
    states = {"failed": [-9], "stopped": [-2, 0]}
    assert run.worker(1).state == "failed"
    assert all(w.exit_code in states[w.state] for w in run.state.workers)
    assert "rank 0 is at its end" in run.log(0)  # its finally blocks ran
    assert (load_file(run.path / "center.safetensors")["w"] > 0).all()
    assert run.memory() == []


def test_the_last_twenty_lines_are_shown(command, script, run):
    path = script("for n in range(40): print('line', n)\nraise SystemExit(7)\n")
    failed = command("run", "--run", run.path, "--workers", 1, "--max-restarts", 0, path)
    assert failed.process.returncode == 1
    assert "Worker 0 ended with status 7" in failed.output
    assert [f"  line {n}\n" in failed.output for n in (19, 20, 39)] == [False, True, True]


def test_a_traceback_is_shown_as_a_whole(command, script, run):
    deep = "".join(f"def f{n}(): f{n + 1}()\n" for n in range(20))
    path = script(f"print('before')\n{deep}f0()\n")
    failed = command("run", "--run", run.path, "--workers", 1, "--max-restarts", 0, path)
    assert "  Traceback (most recent call last):\n" in failed.output
    assert "  before\n" not in failed.output


def test_what_a_dead_worker_started_dies_with_it(command, script, run, tmp_path):
    path = script(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "os.abort()\n"
    )
    command("run", "--run", run.path, "--workers", 1, "--max-restarts", 0, path)
    pid = int((tmp_path / "child").read_text())
    wait_for(lambda: not alive(pid))
    assert "Worker 0 was killed by SIGABRT" in (tmp_path / "output-0").read_text()


def test_a_worker_whose_launcher_is_gone_before_it_begins_does_not_begin(script):
    path = script("print('begun')")
    words = [sys.executable, "-I", "-S", guard.__file__, "1", str(path)]  # 1 is not its parent
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert (ended.stdout, ended.stderr) == ("", "The launcher is gone.\n")


def test_import_springline_needs_neither_rich_nor_typer():
    code = "import springline, sys; print({'rich', 'typer'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_runs_of_another_user_are_refused(command, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    os.chown(runs, 65534, 65534)
    refused = command("run", TRAINING, "elastic", 4, 0)
    assert refused.process.returncode == 2
    assert f"{runs} belongs to another user (id 65534)" in refused.output
    assert list(runs.iterdir()) == []


def test_a_cluster_that_others_could_have_named_is_not_connected_to(command, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    LaunchState(str(TRAINING), [], 1.0, 1, cluster=Asked("10.9.9.9:6379")).write(run)
    run.chmod(0o777)
    for _ in range(2):  # it is not trusted the second time, either
        refused = command("run", "--run", run, TRAINING, "elastic", 4, 0)
        assert refused.process.returncode == 2
    assert "so the cluster that it names (10.9.9.9:6379) is not trusted" in refused.output
