"""Shards on a real Ray cluster that are killed or told to end while workers exchange."""

import os
import signal
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

VALUES = {"w": np.zeros(1_000_000, np.float32)}  # more than Ray sends along with a call
RULES = {
    "elastic": ElasticAverage(workers=2, period=1, moving_rate=0.25),
    "average": ModelAverage(workers=2, period=1),
    "agn": AGN(workers=2, period=1, outer=SGD(0.25)),
}


@pytest.fixture
def join(cluster, tmp_path):
    """`join(rule, rank)` gives a worker of a center with two shards and a storage."""
    opened = []

    def join(rule, rank):
        options = {"shards": 2, "storage": str(tmp_path / "storage"), "grace": 2.0, "token": "it"}
        given = tmp_path.name, Layout.of(VALUES), rule, VALUES
        opened.append(RayCenter.create_or_join(*given, **options))
        return Worker(VALUES, rule, opened[-1], rank, synchronous=False, timeout=60)

    yield join
    for center in opened:
        center.close()
    end_center(tmp_path.name)


@pytest.mark.parametrize("name", ["average", *slow("elastic", "agn")])
def test_shards_are_killed(join, tmp_path, together, caplog, name):
    """x and c stay between the first values of all, and meet in the end."""
    rule = RULES[name]
    workers = [join(rule, rank) for rank in range(2)]
    for one in workers:
        one.parameters["w"][:] = one.rank
    shards = len(workers[0].center.shards)  # under AGN one: the parameter stays whole
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
            if rule.rounds:  # the other may have a round to go
                one.member.leave()
        finally:
            under_way.abort()

    def kill():
        under_way.wait()
        try:
            for number in range(3):
                shard = actors_of(tmp_path.name)[f"shard-{number % shards}"]
                os.kill(pid_of(shard), signal.SIGKILL)
                before = [one.member._row.exchanges for one in workers]
                while any(
                    one.member._row.exchanges < n + 3
                    for one, n in zip(workers, before, strict=True)
                ):
                    assert not under_way.broken
                    time.sleep(0.01)
        finally:
            under_way.abort()

    together(*[lambda w=w: train(w) for w in workers], kill)
    for one in 60 * ([] if rule.rounds else workers):  # in turn, so that all meet
        exchange(one)
    assert "is back after" in caplog.text
    c = workers[0].center.values()["w"]
    least = 1 - 1e-6 if rule.accumulates else 0
    assert least <= c.min() <= c.max() <= 1 + 1e-6
    for one in workers:
        np.testing.assert_allclose(one.parameters["w"], c, atol=1e-6)


def test_a_shard_that_gets_sigterm_writes_a_final_checkpoint(join, tmp_path):
    """As when its machine is taken away; Ray starts another."""
    one = join(RULES["elastic"], 0)
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
    np.testing.assert_array_equal(one.center.values()["w"], 1.5)
    assert one.center.version == 2
