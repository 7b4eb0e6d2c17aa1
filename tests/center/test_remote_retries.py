"""Calls that are repeated, lost on the way there or on the way back: applied exactly once."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from own_rules import EveryFourth, MeanOfPseudoGradients, Pushes, Rolling
from remote import Lost, message, worker
from springline import AGN, ElasticAverage, ModelAverage
from springline.center import CenterError, NonFiniteError
from springline.center.remote import ledger
from springline.center.remote.peer import PeerLostError
from springline.center.remote.steps import Steps
from springline.rules import SGD

WORKERS, EXCHANGES = 3, 30
SIZE = 200_000  # several shards
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(5, np.float32)}
METHODS = (
    *("exchange", "contribute", "reduce"),  # of a shard
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


def test_sums_of_integers_stay_exact(serve, together):
    """AGN with SGD at rate 1 adds whole numbers: one applied twice or not at all would show."""
    rule = AGN(workers=WORKERS, period=1, outer=SGD(1.0))
    service = serve(rule, shards=3)
    troubles = [trouble(k) for k in range(len(service.shards))]
    for peer, disturb in zip(service.shards, troubles, strict=True):
        peer.disturb = disturb
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]

    def train(one):
        for k in range(EXCHANGES):
            g = np.float32(-(one.rank + 1) * (k + 1))
            one.observe({name: np.full_like(value, g) for name, value in VALUES.items()})
            one.step()

    together(*[lambda w=w: train(w) for w in workers])
    total = sum((rank + 1) * (k + 1) for rank in range(WORKERS) for k in range(EXCHANGES))
    for c in workers[0].center.values().values():
        np.testing.assert_array_equal(c, total)
    assert workers[0].center.version == WORKERS * EXCHANGES
    for disturb in troubles:
        assert min(disturb.seen.values()) > 3, "the network was too good to show anything"


OWN = {
    "pushes": Pushes(workers=WORKERS, period=1, outer=EveryFourth()),
    "rounds": MeanOfPseudoGradients(workers=WORKERS, period=1, outer=Rolling()),
}


def push(one, times):
    for _ in range(times):
        for x in one.parameters.values():
            x -= 1
        one.step()


@pytest.mark.parametrize("name", OWN)
def test_outer_optimizers_with_state_take_each_step_once(serve, together, name):
    service = serve(OWN[name], shards=3)
    for k, peer in enumerate(service.shards):
        peer.disturb = trouble(k)
    workers = [worker(service, OWN[name], rank) for rank in range(WORKERS)]
    together(*[lambda w=w: push(w, EXCHANGES) for w in workers])
    steps = EXCHANGES if name == "rounds" else WORKERS * EXCHANGES
    for c in workers[0].center.values().values():
        np.testing.assert_array_equal(c, OWN[name].outer.after(steps))
    assert workers[0].center.version == steps


def silence(shard):
    """Let a shard write no more checkpoints, also of calls that are on their way: it is dead."""
    shard._checkpoints.count = lambda: None
    shard._checkpoints._since = 0


@pytest.mark.parametrize("name", OWN)
def test_a_restarted_shard_has_center_and_state_of_one_moment(serve, together, tmp_path, name):
    """Killed between any two calls, again and again: a step more or less is seen at once."""
    rule = OWN[name]
    service = serve(rule, shards=3, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    rng = random.Random(name)

    def train(one):
        for _ in range(EXCHANGES):
            push(one, 1)
            k, what = rng.randrange(len(service.shards)), rng.random()
            if one.rank == 0 and what < 0.3:
                service.shards[k].target.save()
            elif one.rank == 0 and what < 0.6:
                silence(service.shards[k].target)
                service.shards[k].target = service.make[k]()

    together(*[lambda w=w: train(w) for w in workers])
    most = EXCHANGES if name == "rounds" else WORKERS * EXCHANGES
    allowed = rule.outer.after(np.arange(most + 1))
    for c in workers[0].center.values().values():
        assert np.isin(c, allowed).all()
        assert c.max() < 0
    if name == "pushes":  # the count, and what is not in the center yet, fit the center
        steps = [steps for peer in service.shards for steps in peer.target._steps]
        for block in (block for one in steps for block in one._blocks):
            steps = int(block.now.state["pushes"][0])
            assert (block.now.c == rule.outer.after(steps)).all()
            assert (block.now.state["D"] == steps % 4).all()


@pytest.mark.parametrize("name", OWN)
def test_what_may_be_in_the_center_is_not_sent_again(serve, name, monkeypatch):
    """The answers of one shard are lost for longer than the worker waits."""
    monkeypatch.setattr("springline.center.remote.member._RESTART", 0.2)
    rule = replace(OWN[name], workers=1)
    service = serve(rule, shards=3)
    one = worker(service, rule, timeout=0.3)
    push(one, 1)
    method = "reduce" if name == "rounds" else "exchange"
    service.shards[0].disturb = lambda m: "lose" if m == method else None
    with pytest.raises(CenterError, match="has not answered"):
        push(one, 1)
    service.shards[0].disturb = lambda m: None
    one.exchange()  # takes the center, and contributes nothing
    center = one.center.values()
    for key, c in center.items():
        np.testing.assert_array_equal(c, rule.outer.after(2))
        np.testing.assert_array_equal(one.parameters[key], c)
    push(one, 1)
    for c in one.center.values().values():
        np.testing.assert_array_equal(c, rule.outer.after(3))


def test_an_elastic_exchange_conserves_whatever_is_repeated(serve, together):
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


def test_rounds_do_not_care(serve, together):
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


def test_replies_are_kept_within_bounds(serve, monkeypatch):
    monkeypatch.setattr(ledger, "_KEPT", (4, 6 * 20 + 1))  # of 20 bytes: six
    values = {"b": np.zeros(5, np.float32)}
    rule = ElasticAverage(workers=50, period=1, moving_rate=0.01)
    shard = serve(rule, values).shards[0].target
    replies = {rank: shard.exchange(message(rank, 1, rank)) for rank in range(50)}
    assert len(shard._replies._kept) == ledger.Replies(len(shard._center))._most == 6
    assert ledger.Replies(1000)._most == 4
    again = shard.exchange(message(49, 1, 49))
    np.testing.assert_array_equal(again.data, replies[49].data)
    before = shard.read().data.copy()
    forgotten = shard.exchange(message(0, 1, 0))
    assert forgotten.forgotten
    np.testing.assert_array_equal(forgotten.data, before)
    np.testing.assert_array_equal(shard.read().data, before)


def test_the_next_exchange_acknowledges_a_reply(serve):
    values = {"b": np.zeros(5, np.float32)}
    rule = ElasticAverage(workers=2, period=1, moving_rate=0.5)
    shard = serve(rule, values).shards[0].target
    shard.exchange(message(0, 1, 8.0))
    reply = shard.exchange(message(0, 2, 8.0))
    assert list(shard._replies._kept.values()) == [((1, 2), reply)]
    late = shard.exchange(message(0, 1, 8.0))  # of a call that nobody waits for any more
    assert late.forgotten
    np.testing.assert_array_equal(shard.read().data.view(np.float32), 4 + 2)


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
    rule = AGN(workers=2, period=1, outer=SGD(1.0))
    shard = serve(rule, values).shards[0].target
    shard.exchange(message(0, 7, 1, incarnation=1))
    shard.exchange(message(0, 1, 1, incarnation=2))
    with pytest.raises(CenterError, match="Rank 0 has been taken over"):
        shard.exchange(message(0, 8, 1, incarnation=1))
    np.testing.assert_array_equal(shard.read().data.view(np.float32), -2)


def test_a_repeat_of_what_was_refused_is_refused(serve):
    """AGN's reply is the center; that the exchange was refused must not be lost with it."""
    values = {"b": np.full(5, 3e38, np.float32)}
    shard = serve(AGN(workers=2, period=1, outer=SGD(1.0)), values).shards[0].target
    refused = shard.exchange(message(0, 1, -3e38))
    assert refused.refused == (0,)
    assert shard.exchange(message(0, 1, -3e38)).refused == (0,)


def test_a_retry_that_comes_while_the_exchange_is_applied_waits_for_it(serve, monkeypatch):
    """The call is said to be lost while the shard, which is slow, goes on with it."""
    service = serve(ElasticAverage(period=1, moving_rate=0.25), shards=1)
    one = worker(service)
    shard, began, retried = service.shards[0], threading.Event(), threading.Event()
    ask, apply, asked = shard.ask, Steps.exchange, []

    def lose(method, *arguments):
        asked.append(method)
        pending = ask(method, *arguments)
        if len(asked) > 1:
            retried.set()
            return pending
        assert began.wait(10)
        return Lost(PeerLostError("the actor is unavailable"))

    def slow(*arguments):
        began.set()
        assert retried.wait(10)
        return apply(*arguments)

    monkeypatch.setattr(shard, "ask", lose)
    monkeypatch.setattr(Steps, "exchange", slow)
    one.parameters["w"][:] = 4
    one.exchange()
    assert asked == ["exchange", "exchange"]
    np.testing.assert_array_equal(one.parameters["w"], 3)
    np.testing.assert_array_equal(one.center.values()["w"], 1)


def test_a_refusal_that_is_lost_is_told_again(serve):
    low = {"w": np.full(SIZE, -3e38, np.float32)}
    service = serve(ElasticAverage(period=1, moving_rate=0.25), low, shards=1)
    lost = iter(["lose"])
    service.shards[0].disturb = lambda method: next(lost, None) if method == "exchange" else None
    one = worker(service)
    one.parameters["w"][SIZE // 2] = 3e38
    with pytest.raises(NonFiniteError, match="'w' of rank 0"):
        one.exchange()
    assert next(lost, None) is None
    assert one.center.version == 0
    assert (one.center.values()["w"][SIZE // 2 :][:1] == np.float32(-3e38)).all()
