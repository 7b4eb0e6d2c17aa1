"""Processes that end in the middle of an exchange through memory, on a real Ray cluster."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from marks import slow
from ray_cluster import actors_of, end_center, pid_of
from springline import AGN, ElasticAverage, ModelAverage, Worker
from springline.center import Layout
from springline.center.ray import RayCenter
from springline.rules import SGD

VALUES = {"w": np.zeros(8_000_000, np.float32)}  # of each shard two rings full
RULE = ElasticAverage(workers=2, period=1, moving_rate=0.25)
RULES = {
    "elastic": RULE,
    "average": ModelAverage(workers=2, period=1),
    "agn": AGN(workers=2, period=1, optimizer=SGD(0.25)),
}


@pytest.fixture
def open_center(cluster, tmp_path):
    opened = []

    def open_center(rule=RULE):
        options = {"shards": 2, "storage": str(tmp_path / "storage"), "grace": 2.0}
        given = tmp_path.name, Layout.of(VALUES), rule, VALUES
        opened.append(RayCenter.create_or_join(*given, **options))
        return opened[-1]

    yield open_center
    for center in opened:
        center.close()
    end_center(tmp_path.name)


@pytest.mark.parametrize("name", ["average", *slow("elastic", "agn")])
def test_shards_are_killed(open_center, tmp_path, together, caplog, name):
    """x and c stay between the first values of all, and meet in the end."""
    rule = RULES[name]
    workers = [
        Worker(VALUES, rule, open_center(rule), rank, synchronous=False, timeout=60)
        for rank in range(2)
    ]
    for one in workers:
        one.parameters["w"][:] = one.rank
    shards = len(workers[0].center.shards)
    under_way = threading.Barrier(3)

    def exchange(one):
        if rule.accumulates:  # down to 1, where every one of the workers wants to be
            one.observe({"w": one.parameters["w"] - 1})
        one.exchange()

    def train(one):
        under_way.wait()
        try:
            while not under_way.broken:
                exchange(one)
            if rule.synchronous:  # the other may have a round to go
                one.member.leave()
        finally:
            under_way.abort()

    def kill():
        under_way.wait()
        for number in range(3):
            process = pid_of(actors_of(tmp_path.name)[f"shard-{number % shards}"])
            os.kill(process, signal.SIGKILL)
            before = [one.member._row.exchanges for one in workers]
            while any(
                one.member._row.exchanges < n + 3 for one, n in zip(workers, before, strict=True)
            ):
                assert not under_way.broken
                time.sleep(0.01)
        under_way.abort()

    together(*[lambda w=w: train(w) for w in workers], kill)
    for one in 60 * ([] if rule.synchronous else workers):  # in turn, so that all meet
        exchange(one)
    for member in (one.member for one in workers):
        here = member._rounds._rooms if rule.synchronous else member._streams
        assert here.near == set(range(shards))
    assert "is back after" in caplog.text
    c = workers[0].center.values()["w"]
    least = 1 - 1e-6 if rule.accumulates else 0
    assert least <= c.min() <= c.max() <= 1 + 1e-6
    for one in workers:
        np.testing.assert_allclose(one.parameters["w"], c, atol=1e-6)


def test_a_shard_that_is_told_to_end_writes_itself_and_does(open_center, tmp_path):
    """As when its machine is taken away. It does not wait for a worker to leave, as Ray would."""
    center = open_center()
    one = Worker(VALUES, RULE, center, 0, synchronous=False, timeout=60)
    one.parameters["w"][:] = 4
    one.exchange()
    process = pid_of(actors_of(tmp_path.name)["shard-0"])
    os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    one.exchange()
    np.testing.assert_array_equal(one.parameters["w"], 2.5)
    np.testing.assert_array_equal(center.values()["w"], 1.5)
    assert center.version == 2


STOPS = """
import sys, time
import numpy as np
from springline import ElasticAverage, Worker
from springline.center.ray import RayCenter
from springline.center.served.parts import Parts

center = RayCenter.open(sys.argv[1])
values = {"w": np.zeros(8_000_000, np.float32)}
worker = Worker(values, ElasticAverage(workers=2, moving_rate=0.25, period=1), center, 1)
adopt, pieces = Parts.adopt_piece, []

def stop(*arguments):
    pieces.append(arguments)
    if len(pieces) == 5:
        print("in the middle", flush=True)
        time.sleep(600)
    return adopt(*arguments)

Parts.adopt_piece = stop
worker.parameters["w"][:] = 1
worker.exchange()
"""


def test_a_worker_stops_in_the_middle_and_is_killed(open_center, tmp_path):
    center = open_center()
    one = Worker(VALUES, RULE, center, 0, synchronous=False)
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS, tmp_path.name], stdout=subprocess.PIPE, text=True
    )
    try:
        with process.stdout:
            assert process.stdout.readline() == "in the middle\n"
        for _ in range(5):
            one.exchange()  # nobody waits for it
        assert center.members() == [0, 1]
    finally:
        process.kill()
        process.wait()
    while 1 in center.members():
        one.exchange()
    c = center.values()["w"]
    assert 0 == c.min() < c.max() < 1  # what it had sent is there, and nothing else
    again = Worker(VALUES, RULE, open_center(), 1, synchronous=False)
    np.testing.assert_array_equal(again.parameters["w"], c)
    for _ in range(60):
        again.exchange()
        one.exchange()
    np.testing.assert_allclose(again.parameters["w"], one.parameters["w"], atol=1e-6)
