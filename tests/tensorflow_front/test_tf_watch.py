"""A worker's watch of the parameter servers, and its place among the tasks."""

import os
import socket
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from springline.tensorflow.cluster import Cluster, Watch


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        yield server


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_watch_gives_a_server_time(listener, caplog, monkeypatch):
    address = address_of(listener)
    watches = [Watch({"/job:ps/task:0": address}, timeout) for timeout in (1e-9, 1e9, None)]
    for _ in range(2):
        assert [watch.look() for watch in watches] == [[], [], []]  # not there yet, for any time
    listener.listen()
    assert [watch.look() for watch in watches] == [[], [], []]
    listener.close()
    monkeypatch.setattr(sys.modules[Watch.__module__], "_WARN_EVERY", 0.0)
    assert [watch.look() for watch in watches] == [[], [], []]  # the time begins now
    gone, *waiting = [watch.look() for watch in watches]
    assert waiting == [[], []]
    assert f"/job:ps/task:0 at {address} has been out of reach" in gone[0]
    assert "is out of reach since" in caplog.text


def test_a_server_that_came_back_is_given_its_time_again(listener):
    place = listener.getsockname()
    watch = Watch({"/job:ps/task:0": address_of(listener)}, 1e-9)
    listener.listen()
    watch.look()
    listener.close()
    assert watch.look() == []
    with socket.create_server(place):  # in time
        assert watch.look() == []
    assert watch.look() == []
    assert len(watch.look()) == 1


def test_a_watch_rests_when_training_has_ended(monkeypatch):
    """Also if it ends while it looks; with a new session it looks again."""

    class Slept(Exception):  # noqa: N818 - not an error
        def __init__(self, seconds):
            pass

    def look():
        looks.append(1)
        if ending:
            watch.rest()
        return ["it is gone"]

    def ended(status):
        raise SystemExit(status)

    def slept(seconds):
        raise Slept(seconds)

    looks, ending = [], True
    watch = Watch({"/job:ps/task:0": "127.0.0.1:1"}, 1.0)
    monkeypatch.setattr(watch, "look", look)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(time, "sleep", slept)
    for _ in range(2):
        with pytest.raises(Slept):
            watch.keep()
    assert len(looks) == 1
    watch.answered()
    ending = False
    with pytest.raises(SystemExit):
        watch.keep()


def test_what_was_printed_is_not_lost_when_a_server_is_gone():
    script = (
        "from springline.tensorflow.cluster import Watch\n"
        "print('printed before')\n"
        "watch = Watch({}, 1.0)\n"
        "watch.look = lambda: ['it is gone']\n"
        "watch.keep()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        timeout=200,
    )
    assert ended.returncode == 1
    assert ended.stdout == "printed before\n"  # to a pipe, which is written when it is full
    assert ended.stderr.endswith("springline: it is gone\n")


def test_an_address_without_a_port_is_not_watched(caplog):
    watch = Watch({"/job:ps/task:0": "/bns/server", "/job:ps/task:1": "127.0.0.1:x"}, 1e-9)
    watch.answered()
    assert [watch.look() for _ in range(3)] == [[], [], []]
    assert "/job:ps/task:0 at '/bns/server' has no port, so it is not watched" in caplog.text


@pytest.mark.parametrize("chief", [True, False])
def test_ranks(chief):
    jobs = {"ps": ["a:1"], "worker": ["b:1", "c:1"]} | ({"chief": ["d:1"]} if chief else {})
    spec = tf.train.ClusterSpec(jobs)
    tasks = [("chief", 0)] * chief + [("worker", 0), ("worker", 1)]
    places = [Cluster(spec, job, task, None) for job, task in tasks]
    assert [place.rank for place in places] == list(range(places[0].num_worker))
    assert [place.is_chief for place in places] == [place.rank == 0 for place in places]


def test_a_server_that_lived_between_two_looks_is_missed_too(listener):
    watch = Watch({"/job:ps/task:0": address_of(listener)}, 1e-9)
    assert watch.look() == []
    watch.answered()  # a session was made
    assert watch.look() == []
    (sentence,) = watch.look()
    assert "/job:ps/task:0" in sentence
