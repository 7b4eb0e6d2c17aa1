"""`springline run --ps`: the processes of a TensorFlow cluster, here without TensorFlow."""

import json
import os
import re
import socket

import pytest
from launched import all_gone, wait_for

from springline.launch.backend import LocalCluster
from springline.launch_state import LaunchState, WorkerEntry

# A server listens at its address for ever, a worker listens too, looks for the server and ends.
TASKS = """
import json, os, socket, sys, time
import springline
config = json.loads(os.environ["TF_CONFIG"])
job, k = config["task"]["type"], config["task"]["index"]
host, port = config["cluster"][job][k].split(":")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("", int(port)))  # as TensorFlow does
server.listen()
names = ("TF_CPP_MIN_LOG_LEVEL", "SPRINGLINE_RANK", "SPRINGLINE_WORKERS", "MALLOC_ARENA_MAX",
         "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
told = {**config, "environment": {name: os.environ.get(name) for name in names}}
with open(f"{job}-{k}.jsonl", "a") as file:
    file.write(json.dumps(told) + "\\n")
if job == "ps":
    print("serving", flush=True)
    time.sleep(1000)
while not os.path.exists("ps-1.jsonl"):
    time.sleep(0.01)
host, port = config["cluster"]["ps"][1].split(":")
socket.create_connection((host, int(port)))
for step in springline.steps(3):
    springline.log(loss=1.0)
if sys.argv[1:] == ["wait"]:
    time.sleep(1000)
if k == 1 and open("worker-1.jsonl").read().count("\\n") == 1:
    os.abort()
"""


@pytest.fixture
def tasks(script):
    return script(TASKS)


def told(tmp_path, job, k):
    return [json.loads(line) for line in (tmp_path / f"{job}-{k}.jsonl").read_text().splitlines()]


def test_a_cluster_of_workers_and_servers(command, tasks, run, tmp_path):
    words = ["--ps", 2, "--workers", 3, "--max-restarts", 1, "--run", run.path, tasks]
    environment = {"MALLOC_ARENA_MAX": "5", "TF_CPP_MIN_LOG_LEVEL": None, "TF_CONFIG": "other"}
    (tmp_path / "without" / "tensorflow.py").write_text("raise ImportError('not for launchers')")
    ran = command("run", *words, environment=environment)
    assert ran.process.returncode == 0, ran.output
    assert "on 3 workers and 2 parameter servers" in ran.output
    assert "Worker 1 was killed by SIGABRT; restart 1 of 1." in ran.output
    assert "The output of all is in run/logs, the metrics in run/metrics." in ran.output
    assert "center" not in ran.output

    tasks = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
    lives = {task: told(tmp_path, *task) for task in tasks}
    assert [len(lives[task]) for task in tasks] == [1, 1, 1, 2, 1]
    jobs = lives["ps", 0][0]["cluster"]  # one, and the same for a worker that was restarted
    assert [len(jobs["ps"]), len(jobs["worker"])] == [2, 3]
    assert len({*jobs["ps"], *jobs["worker"]}) == 5
    for (job, k), starts in lives.items():
        for life in starts:
            assert life["cluster"] == jobs
            assert life["task"] == {"type": job, "index": k}
            assert life["environment"] == {
                "TF_CPP_MIN_LOG_LEVEL": "1",
                "SPRINGLINE_RANK": str(k) if job == "worker" else None,
                "SPRINGLINE_WORKERS": "3" if job == "worker" else None,
                "MALLOC_ARENA_MAX": "5",  # the user's own
                "MALLOC_MMAP_MAX_": "0",
                "MALLOC_TRIM_THRESHOLD_": "9999999999",
            }
    state = run.state
    assert [server.state for server in state.ps] == ["stopped", "stopped"]
    assert [worker.state for worker in state.workers] == ["finished"] * 3
    assert re.fullmatch(r"--- ps 1, start 1, .* ---\nserving\n", run_log(run, "ps-1"))
    assert run.log(1).count("--- rank 1") == 2

    shown = command("top", "--once", run.path).output
    assert "the center is on 2 parameter servers" in shown
    assert re.search(r"^ *2 +3 .* 1\.0* ", shown, re.MULTILINE)  # rank, steps, loss

    again = command("run", "--run", run.path, "script.py")  # as many as there were
    assert again.process.returncode == 0, again.output
    assert "Going on with the run in run: script.py on 3 workers and 2 parameter" in again.output
    assert len(run.state.ps[0].starts) == 2


def run_log(run, name):
    return (run.path / "logs" / f"{name}.log").read_text()


def test_a_server_that_dies_ends_the_run(start_command, tasks, run):
    command = start_command("run", "--ps", 2, "--workers", 2, "--run", run.path, tasks, "wait")
    wait_for(lambda: (run.path / "metrics" / "rank-1.jsonl").exists())
    wait_for(lambda: (run.path / "metrics" / "rank-0.jsonl").exists())
    pids = [entry.pid for entry in (*run.state.ps, *run.state.workers)]
    os.kill(pids[1], 9)
    assert command.wait() == 1
    sentence = (
        "Parameter server 1 was killed by SIGKILL, and its part of the center is gone: the run "
        "ends. It can go on from the last checkpoint that the script has saved."
    )
    assert sentence in command.output
    assert (
        "The last lines of parameter server 1 (run/logs/ps-1.log):\n  serving\n" in command.output
    )
    assert "Go on (from the script's own checkpoint) with: springline run --run " in command.output
    assert "restart" not in command.output
    assert all_gone(pids)
    assert [server.state for server in run.state.ps] == ["stopped", "failed"]
    assert [worker.state for worker in run.state.workers] == ["stopped", "stopped"]
    assert [worker.exit_code for worker in run.state.workers] == [-15, -15]


def test_what_comes_after_a_run_on_servers(command, tasks, run, tmp_path):
    first = command("run", "--ps", 2, "--workers", 2, "--run", run.path, tasks)
    assert first.process.returncode == 0, first.output
    other = command("run", "--ps", 2, "--workers", 3, "--run", run.path, tasks)
    assert other.process.returncode == 2
    assert "has 2 workers, which is fixed. Received: --workers 3." in other.output
    exported = command("export", run.path, tmp_path / "center.safetensors")
    assert exported.process.returncode == 2
    assert "was on TensorFlow's parameter servers" in exported.output


def test_a_script_that_does_not_serve_is_told_so(command, script, run):
    path = script("import os, time\nif 'SPRINGLINE_RANK' in os.environ: time.sleep(1000)")
    ran = command("run", "--ps", 1, "--workers", 1, "--run", run.path, path)
    assert ran.process.returncode == 1
    assert "Parameter server 0 ended with status 0: the run ends. Does the script" in ran.output


def test_ctrl_c_ends_workers_and_servers(start_command, tasks, run):
    command = start_command("run", "--ps", 2, "--workers", 1, "--run", run.path, tasks, "wait")
    wait_for(lambda: (run.path / "metrics" / "rank-0.jsonl").exists())
    pids = [entry.pid for entry in (*run.state.ps, *run.state.workers)]
    command.send(2)
    assert command.wait() == 130
    assert "Stopping: the workers end. Ctrl-C again kills." in command.output
    assert all_gone(pids)


def test_a_number_below_zero_is_refused(command, tasks, tmp_path):
    refused = command("run", "--ps", -1, tasks)
    assert refused.process.returncode == 2
    assert "`--ps` must be an integer >= 0. Received: -1." in refused.output
    assert not (tmp_path / "runs").exists()


def test_ports_are_kept_and_can_be_listened_at():
    cluster = LocalCluster(1, 2)
    ports = [int(address.split(":")[1]) for job in cluster.jobs.values() for address in job]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # a task, and the same task again
            with socket.socket(socket.AF_INET6) as task:
                task.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                task.bind(("::", port))
                task.listen()
                socket.create_connection(("127.0.0.1", port)).close()
    cluster.release()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", ports[0]))


def test_servers_are_in_the_state(tmp_path):
    state = LaunchState("train.py", [], 1.0, 1, [WorkerEntry(0)], ps=[WorkerEntry(0, starts=[2.0])])
    state.write(tmp_path)
    assert LaunchState.read(tmp_path) == state
    now = LaunchState("train.py", [], 5.0, 1, [WorkerEntry(0)], ps=[WorkerEntry(0), WorkerEntry(1)])
    now.go_on(tmp_path)
    assert [server.starts for server in now.ps] == [[2.0], []]
