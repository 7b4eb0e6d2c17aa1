"""A worker on a cluster, without a cluster: its actor is called here, as Ray would."""

import contextlib
import logging
import os
import signal
import tempfile

import pytest
from clustered import PLAN
from launched import wait_for
from ray.exceptions import ActorDiedError, ActorUnavailableError

from springline.cluster_address import ClusterAddress
from springline.launch import ray_backend, ray_worker, worker_actor
from springline.launch.directory import LaunchError
from springline.launch.ray_worker import RayWorker
from springline.launch.request import ClusterRequest
from springline.launch.worker_actor import Assignment, FilePart, WorkerActor
from springline.launch_state import CenterStatus


def assignment(script, directory, **environment):
    cluster = ClusterAddress("127.0.0.1:1", "digits", "token")
    return Assignment([str(script)], str(directory), 0, 1, cluster, environment)


class Method:
    """A method of an actor: calls, loses or refuses a call."""

    def __init__(self, actors, name):
        self._actors, self._name = actors, name

    def remote(self, *arguments):
        if self._actors.errors:
            return self._actors.errors.pop(0)
        try:
            return getattr(self._actors.here, self._name)(*arguments)
        except Exception as error:
            return error


class Actors:
    """What stands for Ray: one actor at a time, which can be restarted.

    Attributes:
        here: the actor.
        errors: what the next calls raise instead of being made.
    """

    def __init__(self, given):
        self.given, self.errors = given, []
        self.here = WorkerActor(given)

    def end(self):
        self.here.__ray_shutdown__()
        process = self.here._process
        wait_for(lambda: process is None or process.look() or not process.alive)

    def remote(self, given):  # of a class as well as of its options
        if isinstance(given, Assignment):
            self.here = WorkerActor(given)
        return self

    def options(self):
        return self

    def __getattr__(self, name):
        return Method(self, name)

    def wait(self, refs, timeout):
        return refs, []

    def get(self, ref):
        if isinstance(ref, Exception):
            raise ref
        return ref

    def kill(self, handle):
        self.end()


@pytest.fixture
def on_ray(tmp_path, monkeypatch):
    """`on_ray(text)` makes a worker of a script; its actor is `worker.actors.here`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_actor.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(worker_actor, "_POLL", 0.05)
    monkeypatch.setattr(ray_worker, "_AGAIN", 0.0)
    made = []

    def on_ray(script, directory=tmp_path, **environment):
        given = assignment(script, directory, **environment)
        actors = Actors(given)
        monkeypatch.setattr(ray_worker, "ray", actors)
        (tmp_path / "run").mkdir(exist_ok=True)
        worker = RayWorker(given, tmp_path / "run", {})
        worker._actor = worker.actors = actors
        made.append(actors)
        return worker

    yield on_ray
    for actors in made:
        with contextlib.suppress(OSError):  # it has ended before
            actors.end()


def ended(worker):
    """Start a worker and wait for its end; return its exit code."""
    worker.start()
    wait_for(worker.look)
    return worker.entry.exit_code


def test_what_a_worker_writes_comes_to_the_run_directory(on_ray, script, tmp_path, caplog):
    path = script(
        "import os, springline, sys\n"
        "print('in', os.getcwd(), os.environ.get('SECRET'), os.environ['MINE'])\n"
        "for step in springline.steps(3):\n"
        "    springline.log(loss=1.0)\n"
        "springline.report('well')\n"
        "(springline.directory() / 'own').touch()\n"
        "print('x' * 20_000_000)\n"
        "sys.exit(3)\n"
    )
    caplog.set_level(logging.WARNING)
    worker = on_ray(path, MINE="mine")
    assert ended(worker) == 3
    run = tmp_path / "run"
    log = (run / "logs" / "rank-0.log").read_text()
    assert log.startswith("--- rank 0, start 1, ")
    assert f"in {tmp_path} None mine\nwell\n" in log
    assert log.endswith("x" * 20_000_000 + "\n")
    assert len((run / "metrics" / "rank-0.jsonl").read_text().splitlines()) == 4
    assert (run / "total").read_text() == "3\n"
    assert (run / "report.txt").read_text() == "well\n"
    assert not (run / "own").exists()
    own = worker.actors.here._directory
    assert caplog.messages == [f"Worker 0 has left files in {own} on {worker.entry.machine}."]
    assert worker.entry.machine.endswith(" (127.0.0.1)")

    assert ended(worker) == 3  # the same actor starts it again
    log = (run / "logs" / "rank-0.log").read_text()
    assert log.count("--- rank 0, start ") == log.count("in ") == log.count("well") == 2
    worker.actors.end()
    assert [path.name for path in own.iterdir()] == ["own"]


def test_a_call_that_is_lost_is_made_again(on_ray, script, tmp_path):
    worker = on_ray(script("print(1)\nprint(2)"))
    worker.start()
    for _ in range(3):
        worker.actors.errors.append(ActorUnavailableError("away", b"0" * 16))
    wait_for(worker.look)
    assert worker.entry.exit_code == 0
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text().endswith("---\n1\n2\n")


def test_a_worker_whose_actor_has_died_is_lost_and_starts_with_another(on_ray, script, tmp_path):
    worker = on_ray(script("import time; print('here', flush=True); time.sleep(1000)"))
    worker.start()
    log = tmp_path / "run" / "logs" / "rank-0.log"
    wait_for(lambda: not worker.look() and log.exists() and "here" in log.read_text())
    worker.actors.errors.append(ActorDiedError())
    wait_for(worker.look)
    assert worker.entry.exit_code is None
    assert worker.describe_end().endswith(": its actor or its machine died")
    worker.start()
    wait_for(lambda: not worker.look() and log.read_text().count("here") == 2)
    worker.send(signal.SIGINT)
    wait_for(worker.look)
    assert worker.entry.exit_code == -signal.SIGINT


def test_an_actor_that_cannot_be_made_ends_the_run(on_ray, script):
    worker = on_ray(script("print(1)"))
    worker.actors.errors.append(ActorDiedError())
    worker.start()
    wait_for(worker.look)
    assert worker.refused.startswith("Worker 0 cannot start: ")


def test_a_machine_without_the_script_is_named(on_ray, script, tmp_path):
    path = tmp_path / "late.py"
    worker = on_ray(path)
    assert ended(worker) is None
    assert f"The script {path}, to be run from {tmp_path}, is not on " in worker.refused
    assert worker.last_words() == ""
    path.write_text("print(1)")
    assert ended(worker) == 0


@pytest.mark.parametrize("made", [False, True])
def test_a_worker_makes_no_center_when_the_run_has_had_one(on_ray, script, tmp_path, made):
    path = script("import os, sys; sys.exit(7 if 'SPRINGLINE_JOIN' in os.environ else 0)")
    worker = on_ray(path)
    if made:
        CenterStatus(PLAN, 0, [], []).write(tmp_path / "run" / "center")
    assert ended(worker) == (7 if made else 0)


def test_a_worker_asks_all_to_stop_and_is_asked(on_ray, script, tmp_path):
    stop = tmp_path / "run" / "stop"
    assert ended(on_ray(script("import springline\nspringline.stop()"))) == 0
    assert stop.exists()
    wait = "import springline, time\nwhile not springline.stopping(): time.sleep(0.01)"
    assert ended(on_ray(script(wait))) == 0


def test_a_worker_that_does_not_start_in_time_can_be_stopped(on_ray, script):
    worker = on_ray(script("print(1)"))
    worker.start()
    worker.send(signal.SIGINT)
    assert worker.look()
    assert not worker.alive


def test_a_worker_has_ended_though_what_it_has_left_running_prints_on(on_ray, script, tmp_path):
    path = script(
        "import subprocess, sys\n"
        "chatty = 'import time\\nwhile True: print(1, flush=True); time.sleep(0.01)'\n"
        "print(subprocess.Popen([sys.executable, '-c', chatty]).pid, flush=True)\n"
    )
    worker = on_ray(path)
    assert ended(worker) == 0
    text = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    os.kill(max(int(line) for line in text.split("\n")[1:-1]), signal.SIGKILL)


@pytest.mark.parametrize("name", ["/etc/passwd", "../escaped", "launch.json", "logs/rank-1.log"])
def test_only_a_workers_own_files_are_written(on_ray, script, tmp_path, name):
    worker = on_ray(script("print(1)"))
    worker._write(FilePart(name, (0, 7), b"written"))
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "escaped").exists()


def test_a_full_disk_costs_output_and_no_worker(on_ray, script, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file, where no log can be")
    assert ended(on_ray(script("print(1)"))) == 0
    assert caplog.messages[0].startswith("Some of what worker 0 has written is lost: ")


def test_what_a_killed_worker_has_left_is_removed_when_it_starts_again(on_ray, script, tmp_path):
    left = on_ray(script("print(1)")).actors.here._directory
    assert left.parent == tmp_path
    (left / "logs").mkdir()
    (left / "logs" / "rank-0.log").write_text("of one that was killed")
    worker = on_ray(script("print(2)"))
    assert ended(worker) == 0
    assert "killed" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    worker.actors.end()
    assert not left.exists()


def test_a_directory_of_somebody_else_is_not_used(on_ray, script, tmp_path):
    directory = on_ray(script("print(1)")).actors.here._directory
    directory.rmdir()
    (tmp_path / "elsewhere").mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        on_ray(script("print(1)"))
    directory.unlink()


def test_a_worker_whose_actor_does_not_answer_waits(on_ray, script):
    worker = on_ray(script("import time; time.sleep(1000)"))
    worker.start()
    wait_for(lambda: not worker.look() and worker.entry.pid)
    heard = worker.waits
    worker.actors.errors += [ActorUnavailableError("away", b"0" * 16)] * 3
    wait_for(lambda: not worker.look() and not worker.actors.errors)
    waited = worker.waits
    assert waited > heard
    wait_for(lambda: not worker.look() and worker.waits < waited)


def test_only_what_was_asked_for_is_sent_along(monkeypatch):
    monkeypatch.setenv("WANTED", "1")
    monkeypatch.setenv("SECRET", "2")
    assert ray_backend.environment(["WANTED"]) == {"WANTED": "1"}
    with pytest.raises(LaunchError, match=r"variable ABSENT \(`--env`\), but it is not set here"):
        ray_backend.environment(["WANTED", "ABSENT"])
    with pytest.raises(LaunchError, match=r"takes a name, without a value. Received: WANTED=2\."):
        ray_backend.environment(["WANTED=2"])


def test_an_actor_asks_for_something_or_ray_would_not_spread_them():
    options = ray_backend._options(ClusterRequest("auto", cpus=0, gpus=0))
    assert options["scheduling_strategy"] == "SPREAD"
    assert any(options[kind] for kind in ("num_cpus", "num_gpus", "memory"))
