"""`springline run --address`: a run on a Ray cluster of two nodes, on this machine."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from clustered import ClusterRun
from launched import TRAINING, alive, all_gone, wait_for
from safetensors.numpy import load_file

from springline.center.ray import RayCenter
from springline.center.token import read_token
from springline.errors import TokenError
from springline.launch.ray_keeper import center_name

PATIENCE = 120.0  # seconds for what takes a few, on a busy machine


@pytest.fixture
def run(tmp_path):
    return ClusterRun(tmp_path / "run")


@pytest.fixture
def train(start_command, run, cluster):
    """`train(rule, steps, pause)` starts the training script on two workers of the cluster."""

    def train(rule="elastic", steps=20, pause=0.0, *options, workers=2):
        words = ["--address", "auto", "--workers", workers, "--run", run.path, *options]
        return start_command("run", *words, TRAINING, rule, steps, pause)

    return train


def test_a_run_on_a_cluster_whose_worker_is_killed(train, command, run, tmp_path):
    running = train("elastic", 150, 0.05)
    wait_for(lambda: run.at_work(4), PATIENCE)
    reached, killed = run.steps()[1], run.running(1)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: run.further(1, reached) and run.running(1) != killed, PATIENCE)

    shown = command("top", "--once", run.path)
    for word in ("elastic averaging", "running", "center version", "exchanged"):
        assert word in shown.output
    exported = command("export", run.path, tmp_path / "out.safetensors")
    assert exported.process.returncode == 0, exported.output
    assert load_file(tmp_path / "out.safetensors").keys() == {"w"}
    assert running.process.poll() is None

    token = read_token(run.path)
    assert (run.path / "token").stat().st_mode & 0o777 == 0o600
    with RayCenter.open(center_name(run.path), token=token) as center:
        wait_for(lambda: center.members() == [0, 1], PATIENCE)  # the restarted one joins
    with pytest.raises(TokenError, match=r"`token=read_token\(RUN\)`"):
        RayCenter.open(center_name(run.path))

    assert running.wait(PATIENCE) == 0, running.output
    words = f"on 2 workers of the cluster at auto, the center is {center_name(run.path)}."
    assert words in running.output
    assert "Worker 1 was killed by SIGKILL; restart 1 of 3." in running.output
    assert "The center is in run/center.safetensors" in running.output
    assert run.steps() == [150, 150]
    assert run.center.members == []
    assert [(w.state, w.exit_code, w.restarts) for w in run.state.workers] == [
        ("finished", 0, 0),
        ("finished", 0, 1),
    ]
    assert "is at its end" in run.log(0)
    assert re.findall(r"rank 1, start \d", run.log(1)) == ["rank 1, start 1", "rank 1, start 2"]
    lines = [
        json.loads(x) for x in (run.path / "metrics" / "rank-0.jsonl").read_text().split("\n")[:-1]
    ]
    assert [line["step"] for line in lines] == [0, *range(1, 151)]
    assert (run.path / "total").read_text() == "150\n"
    written = [path for path in run.path.rglob("*") if path.is_file() and path.name != "token"]
    assert not any(token.encode() in path.read_bytes() for path in written)
    assert token not in running.output
    center = load_file(run.path / "center.safetensors")["w"]
    assert np.isfinite(center).all()
    assert (center > 0).all()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--address", "127.0.0.1:1"], "There is no Ray cluster at 127.0.0.1:1. Start one with"),
        (["--address", "auto", "--ps", 1], "Received: --ps 1 with --address auto."),
        (["--address", "ray://here:10001"], "must be `auto` or HOST:PORT"),
        (["--address", "http://here:8265"], "Received: http://here:8265 (the dashboard's)."),
        (["--gpus", 1], "`--gpus` is for a run on a cluster."),
        (["--env", "HOME"], "`--env` is for a run on a cluster."),
        (["--address", "auto", "--center-shards", 0], "`--center-shards` must be an integer >= 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(command, tmp_path, words, sentence):
    refused = command("run", *words, TRAINING)
    assert refused.process.returncode == 2
    assert refused.output.startswith("springline: ")
    assert sentence in refused.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("by", ["a file", "RAY_ADDRESS"])
def test_a_cluster_that_ended_without_a_word_is_not_waited_for(command, tmp_path, monkeypatch, by):
    if by == "a file":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1\n")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    refused = command("run", "--address", "auto", TRAINING)
    assert refused.process.returncode == 2
    sentence = "There is no Ray cluster at 127.0.0.1:1, the last one that Ray knows on this"
    assert sentence in refused.output


def test_without_ray_the_extra_is_named(command, tmp_path):
    (tmp_path / "without" / "ray.py").write_text("raise ImportError('it is not here')")
    refused = command("run", "--address", "auto", TRAINING)
    assert refused.process.returncode == 2
    assert "`pip install springline[ray]`" in refused.output
    assert refused.output.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["average", "agn"])
def test_ctrl_c_saves_the_center_and_the_run_goes_on(train, command, run, rule):
    stopped = train(rule, 10_000, 0.02)
    wait_for(lambda: run.at_work(4), PATIENCE)
    pids = [run.running(rank) for rank in range(2)]
    stopped.send(signal.SIGINT)
    assert stopped.wait(PATIENCE) == 130, stopped.output
    assert all_gone(pids)
    assert (run.path / "stop").exists()
    assert all("is at its end" in run.log(rank) for rank in range(2))  # finally blocks ran
    assert (load_file(run.path / "center.safetensors")["w"] > 0).all()
    assert f"springline run --run run {TRAINING} {rule} 10000 0.02" in stopped.output
    reached = run.steps()

    on = command("run", "--run", run.path, TRAINING, rule, max(reached) + 10, 0)
    assert on.process.returncode == 0, on.output
    assert "Going on with the run in run" in on.output
    assert "on 2 workers of the cluster at auto" in on.output
    assert run.steps() == [max(reached) + 10] * 2
    assert begun(run, 0) == [0, reached[0]]  # not from the start again


def begun(run, rank):
    """At which steps the incarnations of a worker began."""
    lines = (run.path / "metrics" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line.keys() == {"time", "step"}]


@pytest.mark.slow
def test_an_actor_that_is_killed_is_restarted_by_ray_and_its_worker_by_the_launcher(train, run):
    running = train("elastic", 200, 0.05)
    wait_for(lambda: run.at_work(4), PATIENCE)
    reached, lost = run.steps()[1], run.running(1)
    actor = int(Path(f"/proc/{lost}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    wait_for(lambda: not alive(lost), PATIENCE)
    wait_for(lambda: run.further(1, reached) and run.running(1) != lost, PATIENCE)
    assert running.wait(PATIENCE) == 0, running.output
    found = r"Worker 1 was lost on .*: its actor or its machine died; restart 1 of 3\."
    assert re.search(found, running.output)
    assert re.findall(r"rank 1, start \d", run.log(1)) == ["rank 1, start 1", "rank 1, start 2"]


@pytest.mark.slow
def test_a_killed_launcher_takes_its_workers_along_and_the_run_goes_on(train, command, run):
    killed = train("elastic", 10_000, 0.02)
    wait_for(lambda: run.at_work(10), PATIENCE)
    wait_for((run.path / "metrics" / "rank-0.jsonl").exists, PATIENCE)
    pids = [run.running(rank) for rank in range(2)]
    killed.send(signal.SIGKILL)
    killed.wait()
    wait_for(lambda: all_gone(pids))
    reached = run.steps()
    on = command("run", "--run", run.path, TRAINING, "elastic", max(reached) + 50, 0)
    assert on.process.returncode == 0, on.output
    assert len(begun(run, 0)) == 2
    assert begun(run, 0)[1] >= reached[0]  # what came after the last word of it is not lost either


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(start_command, cluster, run, script):
    path = script(
        "import signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(1000)\n"
    )
    words = ["--address", "auto", "--workers", 2, "--run", run.path]
    command = start_command("run", *words, path)
    logs = [run.path / "logs" / f"rank-{rank}.log" for rank in range(2)]
    wait_for(lambda: all(log.exists() and "deaf" in log.read_text() for log in logs), PATIENCE)
    pids = [run.running(rank) for rank in range(2)]
    command.send(signal.SIGINT)
    wait_for(lambda: "Ctrl-C again kills" in command.output)
    assert all(alive(pid) for pid in pids)
    command.send(signal.SIGINT)
    wait_for(lambda: all_gone(pids), seconds=4)  # before the launcher would lose its patience
    assert command.wait(PATIENCE) == 130
    assert [w.exit_code for w in run.state.workers] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_a_script_asks_all_to_stop_says_how_it_ended_and_finds_what_is_its_own(
    command, cluster, run, script, tmp_path
):
    path = script(
        "import os, sys, time\n"
        "import springline\n"
        "for step in springline.steps(100_000):\n"
        "    if springline.rank() == 1 and step == 5:\n"
        "        springline.stop()\n"
        "    time.sleep(0.01)\n"
        "assert springline.directory().name != 'run'\n"
        "assert 'SECRET' not in os.environ\n"
        "print(sys.argv[1:], os.getcwd(), 'RAY_JOB_ID' in os.environ, os.environ['MINE'])\n"
        "springline.report('It went well.')\n"
    )
    options = ["--address", "auto", "--workers", 2, "--run", run.path, "--env", "MINE"]
    words = [*options, path, "-x", "--workers", 7]
    ran = command("run", *words, environment={"MINE": "mine", "SECRET": "told to nobody"})
    assert ran.process.returncode == 0, ran.output
    assert "No center was made" in ran.output
    assert (run.path / "report.txt").read_text() == "It went well.\n"
    for rank in range(2):
        assert f"['-x', '--workers', '7'] {tmp_path} False mine\n" in run.log(rank)


@pytest.mark.slow
def test_a_script_that_keeps_dying_ends_the_run_with_its_last_lines(command, cluster, run, script):
    path = script("import nothing_of_that_name\n")
    words = ["--address", "auto", "--workers", 1, "--max-restarts", 1, "--run", run.path]
    failed = command("run", *words, path)
    assert failed.process.returncode == 1
    assert "Worker 0 ended with status 1; restart 1 of 1. Its last line: " in failed.output
    assert f'  File "{path}", line 1, in <module>\n' in failed.output
    assert "  ModuleNotFoundError: No module named 'nothing_of_that_name'\n" in failed.output
    assert run.worker(0).state == "failed"


@pytest.mark.slow
def test_what_is_missing_on_a_machine_is_said_in_a_sentence(command, cluster, run, tmp_path):
    words = ["--address", "auto", "--workers", 1, "--run"]
    (tmp_path / "storage").write_text("a file")
    refused = command("run", *words, run.path, "--storage", "storage", TRAINING)
    assert refused.process.returncode == 2
    place = tmp_path / "storage" / "run-"
    sentence = rf"Cannot use {place}\w{{8}} for the center's checkpoints"
    assert re.search(sentence, refused.output)
    assert "with `--storage`" in refused.output
    assert not run.path.exists()

    (tmp_path / "copied").mkdir()
    refused = command("run", *words, run.path, "--working-dir", "copied", TRAINING)
    assert refused.process.returncode == 2
    assert "The script must be in the directory that is copied" in refused.output


@pytest.mark.slow
def test_the_working_directory_is_copied(command, cluster, run, script, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "project" / "runs").mkdir()
    (tmp_path / "project" / "runs" / "old").touch()
    script(
        "import os, beside\nprint(beside.WORD, os.path.exists('runs'), os.getcwd())\n",
        "project/main.py",
    )
    words = ["--address", "auto", "--workers", 1, "--run", run.path, "--working-dir", "project"]
    ran = command("run", *words, "project/main.py")
    assert ran.process.returncode == 0, ran.output
    assert re.search(r"^beside False .*_ray_pkg_", run.log(0), re.MULTILINE)


@pytest.mark.slow
def test_workers_that_nobody_launched_meet_by_address(start_command, cluster, tmp_path):
    place = {"SPRINGLINE_ADDRESS": cluster.address, "SPRINGLINE_CENTER": tmp_path.name}
    place |= {"SPRINGLINE_TOKEN": "theirs"}
    workers = [
        start_command(
            *("average", 20, 0),
            driver=(TRAINING,),
            environment=place | {"SPRINGLINE_RANK": str(rank), "SPRINGLINE_WORKERS": "2"},
        )
        for rank in range(2)
    ]
    assert [worker.wait(PATIENCE) for worker in workers] == [0, 0], workers[0].output
    with RayCenter.open(tmp_path.name, token="theirs") as center:
        assert [rank.steps for rank in center.progress()] == [20, 20]
        assert center.version == 10
        center.retire()
    metrics = tmp_path / "runs" / tmp_path.name / "metrics"
    assert sorted(path.name for path in metrics.iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]


@pytest.mark.slow
def test_workers_wait_for_room_and_say_so(start_command, cluster, run, script, tmp_path):
    path = script("import time, pathlib\nwhile not pathlib.Path('end').exists(): time.sleep(0.1)")
    other = ClusterRun(tmp_path / "other")
    words = ["run", "--address", "auto", "--workers"]
    first = start_command(*words, 3, "--run", other.path, path)
    wait_for(lambda: all(other.running(rank) for rank in range(3)), PATIENCE)
    second = start_command(*words, 2, "--run", run.path, path)
    sentence = "no machine that answers: there are no free resources (each needs 1 CPU)"
    wait_for(lambda: sentence in second.output, PATIENCE)
    assert [w.state for w in run.state.workers].count("running") == 1
    (tmp_path / "end").touch()
    assert first.wait(PATIENCE) == second.wait(PATIENCE) == 0
    assert [w.state for w in run.state.workers] == ["finished", "finished"]


@pytest.mark.slow
def test_torch_leaves_the_whole_model(command, cluster, run, script):
    path = script(
        "import torch, springline.torch as st, springline\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))\n"
        "opt = st.ElasticAverageOptimizer(\n"
        "    torch.optim.SGD(model.parameters(), lr=0.1), model=model, period=2)\n"
        "for step in springline.steps(6):\n"
        "    opt.zero_grad()\n"
        "    model(torch.ones(4, 3) + torch.rand(4, 3)).sum().backward()\n"
        "    opt.step()\n"
        "print('in', springline.directory())\n"
    )
    words = ["--address", "auto", "--workers", 2, "--run", run.path, "--center-shards", 1]
    ran = command("run", *words, path)
    assert ran.process.returncode == 0, ran.output + run.log(0)
    assert run.steps() == [6, 6]
    center = load_file(run.path / "center.safetensors")
    assert "1.num_batches_tracked" in center  # which no center holds
    assert len(center) == 7
    (directory,) = re.findall("^in (.*)$", run.log(0), re.MULTILINE)
    wait_for(lambda: not Path(directory).exists())
