"""What a run on a cluster does before and beside its workers, without a cluster."""

import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from launched import wait_for
from ray.exceptions import RayError
from safetensors.numpy import load_file

from springline import ElasticAverage
from springline.center import CenterError, Layout, LocalCenter
from springline.cluster import Cluster
from springline.launch import host, machines, watch
from springline.launch.fetch import Fetched
from springline.launch.host import Assignment, Begun, Host
from springline.launch.remote import RemoteWorker
from springline.launch.request import ClusterRequest
from springline.launch.state import CenterStatus
from springline.launch.watch import ClusterKeeper

LAYOUT, RULE = Layout.of({"w": np.zeros(4, np.float32)}), ElasticAverage(workers=2)


def test_what_speaks_of_the_launchers_machine_is_not_sent():
    own = ["LD_PRELOAD", "SLURM_JOB_ID", "TF_CONFIG", "RANK", "MASTER_ADDR", "XDG_RUNTIME_DIR"]
    sent = machines._surroundings(dict.fromkeys([*own, "RAY_ADDRESS", "MINE"], "x"))
    assert sent == {"MINE": "x"}


def test_a_host_asks_for_something_or_ray_would_not_spread_them():
    options = machines._options(ClusterRequest("auto", cpus=0, gpus=0))
    assert options["scheduling_strategy"] == "SPREAD"
    assert any(options[kind] for kind in ("num_cpus", "num_gpus", "memory"))


@pytest.fixture
def hosted(tmp_path, monkeypatch):
    """`hosted(script, directory)` makes a host on this machine; closed at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host, "_machine", lambda: "here (127.0.0.1)")
    monkeypatch.chdir(tmp_path)
    made = []

    def hosted(script, directory):
        cluster = Cluster("127.0.0.1:1", "digits")
        made.append(Host(Assignment(str(script), [], str(directory), 0, 1, cluster, {}, "token")))
        return made[-1]

    yield hosted
    for one in made:
        one.close()


def test_a_machine_without_the_directory_is_named(hosted, script, tmp_path):
    begun = hosted(script("print(1)"), tmp_path / "nowhere").begin(1, [], False)
    assert begun.pid is None
    assert f"The script is run from {tmp_path / 'nowhere'}, which cannot be used" in begun.refused
    assert "on here (127.0.0.1): No such file or directory." in begun.refused


@pytest.mark.parametrize("join", [False, True])
def test_a_worker_is_told_that_there_is_a_center(hosted, script, tmp_path, join):
    path = script("import os, sys; sys.exit(7 if 'SPRINGLINE_JOIN' in os.environ else 0)")
    one = hosted(path, tmp_path)
    one.begin(1, [], join)
    wait_for(lambda: one.news({}, False).ended)
    assert one.news({}, False).code == (7 if join else 0)


def test_a_worker_has_ended_though_what_it_has_left_running_prints_on(hosted, script, tmp_path):
    path = script(
        "import subprocess, sys\n"
        "chatty = 'import time\\nwhile True: print(1, flush=True); time.sleep(0.01)'\n"
        "print(subprocess.Popen([sys.executable, '-c', chatty]).pid, flush=True)\n"
    )
    one, fetched = hosted(path, tmp_path), Fetched(tmp_path / "run", 0)
    assert one.begin(1, [], False).pid

    def ask():
        news = one.news(fetched.have, stopping=False)
        for piece in news.pieces:
            fetched.take(piece)
        return news

    wait_for(lambda: ask().ended)
    text = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    left = max(int(line) for line in text.split("\n")[1:-1])
    try:
        log = one._directory / "logs" / "rank-0.log"
        wait_for(lambda: log.stat().st_size > len(text))
        assert ask().pieces == []
    finally:
        os.kill(left, signal.SIGKILL)


def test_only_directories_of_ours_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = Path(tempfile.mkdtemp(prefix=host._PREFIX))
    linked = Path(tempfile.mkdtemp(prefix=host._PREFIX))
    (linked / "lock").symlink_to(tmp_path / "made")
    held = Path(tempfile.mkdtemp(prefix=host._PREFIX))
    lock = host._lock(held)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{host._PREFIX}link").symlink_to(tmp_path / "elsewhere")
    host.sweep(-1.0)
    os.close(lock)
    assert not left.exists()
    assert held.exists()
    assert linked.exists()
    assert not (tmp_path / "made").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.setattr(os, "getuid", lambda: held.stat().st_uid + 1)
    host.sweep(-1.0)
    assert held.exists()


def test_a_worker_whose_host_cannot_be_made_is_not_alive(tmp_path):
    cluster = Cluster("127.0.0.1:1", "digits")
    assignment = Assignment("train.py", [], None, 0, 1, cluster, {}, "token")
    worker = RemoteWorker(assignment, tmp_path, {"num_gpus": -1})
    with pytest.raises(ValueError, match="num_gpus"):
        worker.start()
    assert not worker.alive


@pytest.fixture
def remote(tmp_path):
    """A worker whose host writes down what it is asked."""
    cluster = Cluster("127.0.0.1:1", "digits")
    assignment = Assignment("train.py", [], None, 0, 1, cluster, {}, "token")
    worker = RemoteWorker(assignment, tmp_path, {})
    worker._host = mock.Mock()
    return worker


def test_a_worker_makes_no_center_when_the_run_has_had_one(remote, tmp_path):
    remote.start()
    CenterStatus({}, 0, [], []).write(tmp_path / "center")
    remote.start()
    begun = remote._host.begin.remote.call_args_list
    assert [join for (_, _, join), _ in begun] == [False, True]


def test_a_machine_that_refuses_a_worker_ends_the_run_only_at_first(remote, monkeypatch):
    monkeypatch.setattr("springline.launch.remote.ray", mock.Mock())
    remote.start()
    assert remote._hear_begun(Begun("here", refused="There is no storage."))
    assert remote.refused == "There is no storage."
    remote.log.parent.mkdir()
    remote.log.write_text("Of the life before.\n")
    remote.refused, remote._host = None, mock.Mock()
    remote.start()
    assert remote._hear_begun(Begun("here", refused="There is no storage."))
    assert remote.refused is None
    assert not remote.alive
    assert remote.describe_end() == "was lost on here: There is no storage"
    assert remote.last_words() == ""  # and not those of the life before
    assert remote._host is None  # the next one may be on another machine


def test_a_script_that_is_away_is_waited_for_in_a_later_life(hosted, tmp_path, monkeypatch):
    path = tmp_path / "late.py"
    one = hosted(path, tmp_path)
    assert f"The script {path} is not on here (127.0.0.1), or" in one.begin(1, [], False).refused
    monkeypatch.setattr(host.time, "sleep", lambda _: path.touch())
    assert one.begin(2, [], False).pid
    wait_for(lambda: one.news({}, False).ended)


class Silent:
    """A center on a cluster that does not answer."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def nobody(self, *_):
        raise RayError("nobody is there")

    shards = property(nobody)
    save = values = nobody


def test_a_cluster_that_does_not_answer_ends_no_keeper(tmp_path, monkeypatch):
    opened, said = [], []
    often = threading.Event()

    def open_center(_):
        opened.append(Silent())
        if len(opened) > 3:
            often.set()
        return opened[-1]

    monkeypatch.setattr(watch, "open_center", open_center)
    keeper = ClusterKeeper(tmp_path, 0.01, said.append, "digits")
    keeper.start()
    assert often.wait(30.0)
    sentence = "The cluster has not answered (RayError: nobody is there)."
    with pytest.raises(CenterError) as raised:
        keeper.finish()
    assert str(raised.value) == sentence
    assert said == [f"No checkpoint: {sentence}"]


def saved_center(run, value):
    """Write a checkpoint of a center to a run's directory."""
    (run / "center").mkdir(exist_ok=True)
    center = LocalCenter(LAYOUT, RULE, {"w": np.full(4, value, np.float32)})
    center.save(run / "center" / "checkpoint.safetensors")


def test_a_center_that_has_left_the_cluster_is_taken_from_its_last_checkpoint(
    tmp_path, monkeypatch
):
    """And not what an earlier launch has left."""
    saved_center(tmp_path, 1.0)
    (tmp_path / "center.safetensors").write_bytes(b"of an earlier launch")
    said = []
    keeper = ClusterKeeper(tmp_path, 30.0, said.append, "digits")
    monkeypatch.setattr(watch, "open_center", lambda name: None)
    keeper.start()
    saved_center(tmp_path, 2.0)
    keeper.saved = time.time()  # as if it had done so
    final = keeper.finish()
    assert final == tmp_path / "center.safetensors"
    np.testing.assert_array_equal(load_file(final)["w"], 2)
    assert re.match(r"The center is not on the cluster any more: it is taken from", said[0])


def test_a_launch_without_workers_keeps_what_an_earlier_one_has_left(tmp_path, monkeypatch):
    saved_center(tmp_path, 1.0)
    (tmp_path / "center.safetensors").write_bytes(b"of an earlier launch")
    keeper = ClusterKeeper(tmp_path, 30.0, [].append, "digits")
    monkeypatch.setattr(watch, "open_center", lambda name: None)
    keeper.start()
    assert keeper.finish().read_bytes() == b"of an earlier launch"


def test_that_nobody_answers_is_said_once():
    said = []
    watching = SimpleNamespace(silence=21.0)
    place = SimpleNamespace(
        _watch=watching, _silent=False, _say=said.append, _workers=[], _told=set()
    )
    for silence in (1.0, 21.0, 22.0, 1.0, 30.0):
        watching.silence = silence
        machines.Machines.tick(place)
    assert [text.partition(". ")[0] for text in said] == [
        "The center has not answered for 21 s",
        "The center has not answered for 30 s",
    ]
