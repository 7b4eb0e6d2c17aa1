"""An exchange with a remote center under the asynchronous rules: a call to each shard."""

import threading
from typing import ClassVar

import numpy as np
import pytest

from remote import worker
from springline import AGN, ElasticAverage
from springline.center import CenterError, NonFiniteError
from springline.center.remote.peer import PeerLostError
from springline.center.remote.worker_blocks import WorkerBlocks
from springline.rules import SGD
from springline.rules.outer import Toward

SIZE = 200_000  # several shards
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(5, np.float32)}


class CountingToward(Toward):
    """Counts how many elements it steps."""

    made: ClassVar[list[int]] = []

    def step(self, now, g, exchange, then):
        self.made.append(g.size)
        super().step(now, g, exchange, then)


class Counting(ElasticAverage):
    """Counts how many elements it adopts."""

    made: ClassVar[list[int]] = []

    @property
    def outer(self):
        return CountingToward(self.alpha)

    def adopt(self, x, base, c, work):
        self.made.append(c.size)
        super().adopt(x, base, c, work)


def test_an_exchange_is_one_call_to_each_shard_and_makes_δ_once_on_either_side(serve):
    rule = Counting(period=1, moving_rate=0.25)
    service = serve(rule)
    one, asked = worker(service, rule, 0), []
    for made in (Counting.made, CountingToward.made):
        made.clear()
    for peer in service.shards:
        peer.disturb = asked.append
    for _ in range(3):
        one.exchange()
    assert asked == ["exchange"] * 3 * len(service.shards)
    assert sum(Counting.made) == sum(CountingToward.made) >= 3 * (SIZE + 5)


def test_of_a_message_that_is_not_finite_no_shard_gets_a_part(serve):
    rule = AGN(period=1, outer=SGD(1.0))
    service = serve(rule, VALUES | {"last": np.zeros(SIZE, np.float32)})
    one = worker(service, rule)
    one.observe({"w": np.ones(SIZE, np.float32), "last": np.full(SIZE, np.nan, np.float32)})
    with pytest.raises(NonFiniteError, match="'last' of rank 0 has NaN or Inf"):
        one.exchange()
    assert [peer.target.rows()[0][0].exchanges for peer in service.shards] == [0, 0]
    np.testing.assert_array_equal(one.center.values()["w"], 0)


def test_an_exchange_that_is_broken_off_leaves_nothing_under_way(serve, monkeypatch):
    service = serve(ElasticAverage(workers=2, period=1, moving_rate=0.25))
    one, two = (worker(service, rank=rank) for rank in range(2))
    one.parameters["w"][:] = 4

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerBlocks, "_adopt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.exchange()
    two.exchange()
    one.take_center()
    one.exchange()
    np.testing.assert_array_equal(one.parameters["w"], one.center.values()["w"])
    assert one.center.version == 2


def test_who_leaves_does_not_wait_for_a_shard_that_is_away(serve, background):
    """As after Ctrl-C, while an exchange is under way in the background."""
    service = serve(ElasticAverage(period=1))
    one = worker(service, timeout=None)
    away = threading.Event()

    def be_away(method):
        if method == "exchange":
            away.set()
            raise PeerLostError("its machine is down")

    service.shards[0].disturb = be_away
    exchange = background(one.exchange)
    assert away.wait(10)
    background(one.member.leave).result(10)
    with pytest.raises(CenterError, match="Rank 0 has left the center"):
        exchange.result(10)
    assert service.head.target._membership.alive() == []
