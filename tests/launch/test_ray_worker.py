"""A worker on a cluster, without a cluster: its actor is called here, as Ray would."""

import contextlib
import logging
import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
from clustered import PLAN
from launched import wait_for
from ray.exceptions import RayError

from springline.cluster_address import ClusterAddress
from springline.launch import ray_backend, ray_worker
from springline.launch.directory import LaunchError
from springline.launch.ray_worker import News, RayWorker, WorkerActor
from springline.launch.request import ClusterRequest
from springline.launch_state import CenterStatus


class Method:
    """A method of an actor: calls, loses or refuses a call."""

    def __init__(self, actors, name):
        self._actors, self._name = actors, name

    def remote(self, *arguments):
        if self._actors.errors:
            return self._actors.errors.pop(0)
        try:
            return getattr(self._actors.here, self._name)(*arguments)
        except OSError as error:
            return RayError(str(error))


class Actors:
    """What stands for Ray: one actor at a time, which can be restarted.

    Attributes:
        here: the actor.
        errors: what the next calls raise instead of being made.
        answers: whether calls are answered.
    """

    def __init__(self, create):
        self.create, self.errors, self.here, self.answers = create, [], None, True

    def __call__(self):
        self.here = self.create()
        return self

    def end(self):
        if self.here is None:
            return
        self.here.__ray_shutdown__()
        process = self.here._process
        wait_for(lambda: process is None or process.look() or not process.alive)

    def restart(self):
        """Do what Ray does with an actor that has died."""
        self.end()
        self()

    def __getattr__(self, name):
        return Method(self, name)

    def wait(self, refs, timeout):
        return (refs, []) if self.answers else ([], refs)

    def get(self, ref):
        if isinstance(ref, Exception):
            raise ref
        return ref

    def kill(self, handle):
        self.end()


@pytest.fixture
def on_ray(tmp_path, monkeypatch):
    """`on_ray(text)` makes a worker of a script; its actor is `worker.actors.here`."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))
    monkeypatch.setattr(ray_worker.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_worker, "_EVERY", 0.05)
    made = []

    def on_ray(script, find=None, **added):
        actors = Actors(lambda: WorkerActor([str(script)], str(tmp_path), 0, 1))
        monkeypatch.setattr(ray_worker, "ray", actors)
        (tmp_path / "run").mkdir(exist_ok=True)
        worker = RayWorker(tmp_path / "run", 0, actors, find or (lambda: added))
        worker.actors = actors
        actors.util = ray_worker_util
        made.append(actors)
        return worker

    ray_worker_util = ray_worker.ray.util
    yield on_ray
    for actors in made:
        with contextlib.suppress(OSError):  # it has ended before
            actors.end()


def ended(worker):
    """Start a worker and wait for its end; return its exit code."""
    worker.start()
    wait_for(worker.look)
    return worker.entry.exit_code


def test_what_has_not_changed_is_not_read_again(on_ray, script, tmp_path):
    def read():
        counters = Path("/proc/self/io").read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in counters if line.startswith("rchar"))

    worker = on_ray(script("import springline\nspringline.log(loss=1.0)\n"))
    assert ended(worker) == 0
    actor = worker.actors.here
    (actor._directory / "center").mkdir()
    (actor._directory / "center" / "extras.safetensors").write_bytes(bytes(10_000_000))
    have = {name: mark for name, (mark, _) in actor._changed({})}
    assert {"center/extras.safetensors", "metrics/rank-0.jsonl"} <= have.keys()
    before = read()
    assert list(actor._changed(have)) == []
    assert read() - before < 1_000_000
    (actor._directory / "lightning").write_text("0\n")  # as `springline.integrations.lightning`
    assert actor._left() is None


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
    assert (own / "own").exists()


def test_a_call_that_is_retried_changes_nothing(on_ray, script):
    worker = on_ray(script("print(1)"))
    worker.start()
    actor, start = worker.actors.here, worker._begin
    first = actor.poll(start, {}, False)
    assert actor.poll(start, {}, False).pid in (first.pid, None)
    wait_for(lambda: actor.poll(None, {}, False).code == 0)
    mark, log = actor.poll(None, {}, False).files["logs/rank-0.log"]
    assert log.endswith(b"---\n1\n")
    assert actor.poll(None, {"logs/rank-0.log": mark}, False) == News(actor._machine, code=0)


def test_a_worker_whose_actor_was_restarted_is_lost_and_starts_again(on_ray, script, tmp_path):
    worker = on_ray(script("import time; print('here', flush=True); time.sleep(1000)"))
    worker.start()
    log = tmp_path / "run" / "logs" / "rank-0.log"
    wait_for(lambda: not worker.look() and log.exists() and "here" in log.read_text())
    worker.actors.restart()
    wait_for(worker.look)
    assert worker.entry.exit_code is None
    assert worker.describe_end().endswith(" (127.0.0.1): its actor or its machine died")
    worker.start()
    wait_for(lambda: not worker.look() and log.read_text().count("here") == 2)
    worker.send(signal.SIGINT)
    wait_for(worker.look)
    assert worker.entry.exit_code == -signal.SIGINT


def test_an_actor_that_is_gone_for_good_is_replaced(on_ray, script):
    worker = on_ray(script("print(1)"))
    worker.actors.errors.append(RayError("first line\nWhy it is so."))
    assert ended(worker) is None
    assert worker.describe_end() == "was lost: Why it is so"
    assert ended(worker) == 0


def test_a_machine_without_the_script_is_named(on_ray, script, tmp_path):
    path = tmp_path / "late.py"
    worker = on_ray(path)
    assert ended(worker) is None
    assert f"was lost: {path} is not on " in worker.describe_end()
    path.write_text("print(1)")
    assert ended(worker) == 0


def test_a_worker_makes_no_center_when_the_run_has_had_one(on_ray, script, tmp_path):
    path = script("import os, sys; sys.exit(7 if 'SPRINGLINE_JOIN' in os.environ else 0)")
    cluster = ClusterAddress("127.0.0.1:1", "digits", "token")
    worker = on_ray(path, partial(ray_backend.added, tmp_path / "run", cluster, {}))
    assert ended(worker) == 0
    CenterStatus(PLAN, 0, [], []).write(tmp_path / "run" / "center")
    assert ended(worker) == 7  # the same worker, restarted
    assert ended(on_ray(path, partial(ray_backend.added, tmp_path / "run", cluster, {}))) == 7


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
    worker._hear(News("machine", pid=1, files={name: (7, b"written")}))
    assert list((tmp_path / "run").iterdir()) == []
    assert not (tmp_path / "escaped").exists()


def test_a_full_disk_costs_output_and_no_worker(on_ray, script, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file, where no log can be")
    assert ended(on_ray(script("print(1)"))) == 0
    assert caplog.messages[0].startswith("Some of what worker 0 has written is lost: ")


def test_a_killed_worker_whose_actor_does_not_answer_is_given_up(on_ray, script, monkeypatch):
    worker = on_ray(script("import time; time.sleep(1000)"))
    worker.start()
    wait_for(lambda: not worker.look() and worker.entry.pid)
    worker.actors.answers = False
    heard = worker.waits
    wait_for(lambda: not worker.look() and worker.waits > heard + 0.1)
    monkeypatch.setattr(ray_worker, "_PATIENCE", 0.0)
    assert not worker.look()
    worker.kill()
    assert worker.look()
    assert worker.describe_end().endswith("it did not end")


def test_only_what_was_asked_for_is_sent_along(monkeypatch):
    monkeypatch.setenv("WANTED", "1")
    monkeypatch.setenv("SECRET", "2")
    assert ray_backend.environment(["WANTED"]) == {"WANTED": "1"}
    for name in ("ABSENT", "WANTED=2"):
        with pytest.raises(LaunchError, match=rf"that is set here, .* Received: {name}\."):
            ray_backend.environment(["WANTED", name])


def test_an_actor_asks_for_something_or_ray_would_not_spread_them():
    options = ray_backend._options(ClusterRequest("auto", cpus=0, gpus=0))
    assert options["scheduling_strategy"] == "SPREAD"
    assert any(options[kind] for kind in ("num_cpus", "num_gpus", "memory"))
