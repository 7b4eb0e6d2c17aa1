"""Calls that are repeated, lost on the way there or on the way back: applied exactly once."""

import random
import threading

import numpy as np
import pytest

from served import message, worker
from springline import AGN, ElasticAverage, ModelAverage
from springline.center import CenterError
from springline.center.served.peer import PeerLostError
from springline.center.served.replies import KEPT
from springline.rules import SGD

WORKERS, EXCHANGES = 3, 30
SIZE = 200_000  # several shards
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(5, np.float32)}
METHODS = (
    *("exchange", "stream", "lend", "contribute", "reduce", "mean"),  # of a shard
    *("begin", "contribute", "withdraw"),  # of the head
)


def trouble(seed, methods=METHODS):
    """A bad network: calls are lost there, lost back, or made twice."""
    rng, lock = random.Random(seed), threading.Lock()
    seen = {"lost": 0, "lose": 0, "twice": 0}

    def disturb(method):
        if method not in methods:
            return None
        with lock:
            what = rng.choice(["lost", "lose", "twice", None, None])
            if what:
                seen[what] += 1
        if what == "lost":
            raise PeerLostError("the call was lost")
        return what

    disturb.seen = seen
    return disturb


@pytest.fixture(params=["by message", "through memory"])
def way(request, monkeypatch, calls):
    if request.param == "through memory":
        monkeypatch.setattr("springline.center.served.near.SMALL", 0)


def test_sums_of_integers_stay_exact(serve, together, way):
    """AGN with SGD at rate 1 adds whole numbers: one applied twice or not at all would show."""
    rule = AGN(workers=WORKERS, period=1, optimizer=SGD(1.0))
    service = serve(rule, shards=3)
    troubles = [trouble(k) for k in range(len(service.shards))]
    for peer, disturb in zip(service.shards, troubles, strict=True):
        peer.disturb = disturb
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]

    def train(one):
        for k in range(EXCHANGES):
            one.observe(dict.fromkeys(VALUES, np.float32(-(one.rank + 1) * (k + 1))))
            one.step()

    together(*[lambda w=w: train(w) for w in workers])
    total = sum((rank + 1) * (k + 1) for rank in range(WORKERS) for k in range(EXCHANGES))
    for c in workers[0].center.values().values():
        np.testing.assert_array_equal(c, total)
    assert workers[0].center.version == WORKERS * EXCHANGES
    for disturb in troubles:
        assert min(disturb.seen.values()) > 3, "the network was too good to show anything"


def test_an_elastic_exchange_conserves_whatever_is_repeated(serve, together, way):
    """With α = ¼ and powers of two every sum is exact: at most 3 × 8 bits are added to 22."""
    rule = ElasticAverage(workers=WORKERS, period=1, moving_rate=0.25)
    values = {name: value.astype(float) for name, value in VALUES.items()}
    service = serve(rule, values, shards=3)
    for k, peer in enumerate(service.shards):
        peer.disturb = trouble(k)
    workers = [worker(service, rule, rank, values) for rank in range(WORKERS)]
    for one in workers:
        for x in one.parameters.values():
            x += 2.0 ** (20 + one.rank)

    def train(one):
        for _ in range(4):
            one.step()

    together(*[lambda w=w: train(w) for w in workers])
    for name in VALUES:
        held = [one.parameters[name] for one in workers]
        total = sum([*held, workers[0].center.values()[name]])
        np.testing.assert_array_equal(total, sum(2.0 ** (20 + r) for r in range(WORKERS)))


def test_rounds_do_not_care(serve, together, way):
    rule = ModelAverage(workers=WORKERS, period=1)
    service = serve(rule, shards=3)
    for k, peer in enumerate((service.head, *service.shards)):
        peer.disturb = trouble(k)
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]

    def train(one):
        seen = []
        for k in range(EXCHANGES):
            for x in one.parameters.values():
                x[:] = k + 3 * one.rank
            one.step()
            seen.append(float(one.parameters["w"][0]))
        return seen

    expected = [k + 3.0 for k in range(EXCHANGES)]
    assert together(*[lambda w=w: train(w) for w in workers]) == [expected] * WORKERS
    assert workers[0].center.version == EXCHANGES


def test_no_copy_per_worker_is_kept(serve):
    values = {"b": np.zeros(5, np.float32)}
    rule = ElasticAverage(workers=50, period=1, moving_rate=0.01)
    shard = serve(rule, values).shards[0].target
    replies = {rank: shard.exchange(message(rank, 1, rank)) for rank in range(50)}
    assert len(shard._replies._kept) == KEPT
    again = shard.exchange(message(49, 1, 49))
    np.testing.assert_array_equal(again.data, replies[49].data)
    before = shard.read().data.copy()
    forgotten = shard.exchange(message(0, 1, 0))
    assert forgotten.forgotten
    np.testing.assert_array_equal(forgotten.data, before)
    np.testing.assert_array_equal(shard.read().data, before)
    for rank in range(50):
        shard.received(rank, (1, 1))
    assert not shard._replies._kept


def test_a_worker_goes_on_from_the_center_when_its_answer_is_lost_for_good(serve, caplog):
    rule = ElasticAverage(period=1, moving_rate=0.5)
    service = serve(rule)
    one = worker(service, rule, 0)
    target = service.shards[0].target
    lost = iter(["lose"])

    def disturb(method):
        if method == "exchange":
            how = next(lost, None)
            if how is None:
                target._replies._kept.clear()
            return how
        return None

    service.shards[0].disturb = disturb
    one.parameters["w"][:] = 8
    one.exchange()
    c = one.center.values()["w"]
    np.testing.assert_array_equal(c, 4)
    assert "going on from the center" in caplog.text
    np.testing.assert_array_equal(one.parameters["w"], 4)


def test_a_worker_that_was_replaced_is_refused(serve):
    values = {"b": np.zeros(5, np.float32)}
    rule = AGN(workers=2, period=1, optimizer=SGD(1.0))
    shard = serve(rule, values).shards[0].target
    shard.exchange(message(0, 7, 1, incarnation=1))
    shard.exchange(message(0, 1, 1, incarnation=2))
    with pytest.raises(CenterError, match="Rank 0 has been taken over"):
        shard.exchange(message(0, 8, 1, incarnation=1))
    np.testing.assert_array_equal(shard.read().data.view(np.float32), -2)


class Moving(ElasticAverage):
    """The center moves while a message is made."""

    def contribute(self, local, c, gradients):
        δ = super().contribute(local, c, gradients)
        if self.shards:
            self.shards[0]._center.view(np.float32)[:] += 16
        return δ


def test_without_locks_both_sides_use_the_same_center(serve):
    values = {"b": np.zeros(5, np.float32)}
    rule = Moving(moving_rate=0.25, period=1)
    object.__setattr__(rule, "shards", [])
    service = serve(rule, values, use_locking=False)
    shard = service.shards[0].target
    shard._rule.shards.append(shard)
    reply = shard.exchange(message(0, 1, 8.0))
    c = shard.read().data.view(np.float32)
    δ = 0.25 * (8.0 - reply.data.view(np.float32))
    np.testing.assert_array_equal(c, 16 + δ)


def test_a_late_repeat_does_not_replace_a_newer_message(serve):
    values = {"b": np.zeros(5, np.float32)}
    rule = ModelAverage(workers=1, period=1)
    shard = serve(rule, values).shards[0].target
    shard.contribute(message(0, 2, 7.0), 1)
    shard.contribute(message(0, 1, 5.0), 1)
    mean = shard.reduce(1, [0], message(0, 2, 7.0).sender)
    np.testing.assert_array_equal(mean.data.view(np.float32), 7)
    again = shard.reduce(1, [], message(0, 2, 7.0).sender)
    assert again is mean  # one copy for all who ask


def test_a_round_whose_contributors_are_not_known_takes_who_is_here(serve):
    values = {"b": np.zeros(5, np.float32)}
    shard = serve(ModelAverage(workers=2, period=1), values).shards[0].target
    shard.contribute(message(1, 1, 5.0), 1)
    assert shard.reduce(1, [0, 1], message(1, 1, 5.0).sender) == [0]
    mean = shard.reduce(1, [], message(1, 1, 5.0).sender)
    np.testing.assert_array_equal(mean.data.view(np.float32), 5)
    assert shard.reduce(2, [], message(1, 2, 5.0).sender) == [1]  # who is in it for certain


def test_a_repeat_of_what_was_refused_is_refused(serve):
    """AGN's reply is the center; that the exchange was refused must not be lost with it."""
    values = {"b": np.full(5, 3e38, np.float32)}
    shard = serve(AGN(workers=2, period=1, optimizer=SGD(1.0)), values).shards[0].target
    refused = shard.exchange(message(0, 1, -3e38))
    assert refused.refused == 0
    assert shard.exchange(message(0, 1, -3e38)).refused == 0
