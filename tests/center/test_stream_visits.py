"""A shard stays in a worker's memory from one exchange to the next."""

import signal
import time

import numpy as np
import pytest
from streamed import RULES, asked_of, center_of

from served import worker
from springline import ElasticAverage
from springline.center.errors import TakenOverError
from springline.center.served.messages import Message, Sender
from springline.center.served.near import SLOT, SLOTS, Request
from springline.center.served.peer import PeerLostError

RULE = ElasticAverage(workers=3, period=1, moving_rate=0.25)
VALUES = {"w": np.zeros(SLOTS * SLOT // 4, np.float32)}  # of one shard: as many pieces as slots


def observed(one, value):
    if one.rule.accumulates:
        one.observe(dict.fromkeys(one.parameters, np.float32(value)))
    else:
        for x in one.parameters.values():
            x += value


@pytest.mark.parametrize("name", ["elastic", "sgd"])
def test_it_is_called_once(serve, name, small):
    rule = RULES.get(name, RULE)
    service = serve(rule)
    workers = [worker(service, rule, rank) for rank in range(3)]
    asked = asked_of(service)
    for number in range(4):
        for one in workers:
            observed(one, 4.0**number)
            one.exchange()
    assert asked == ["stream"] * len(workers) * len(service.shards)
    assert workers[0].center.version == 4 * 3
    if name == "sgd":
        np.testing.assert_array_equal(center_of(service), -0.5 * 3 * (1 + 4 + 16 + 64))
    else:
        total = sum((one.parameters["w"] for one in workers), center_of(service))
        np.testing.assert_array_equal(total, 3 * (1 + 4 + 16 + 64))


def test_what_a_worker_says_is_of_each_exchange(serve, small):
    """Rates, and which parameters have gradients, come anew every time."""
    values = VALUES | {"b": np.zeros(7, np.float32)}
    rule = RULES["sgd"]
    service = serve(rule, values)
    one = worker(service, rule, 0, values)
    asked = asked_of(service)
    for rates, names in (((1, 1), "w"), ((2, 4), "wb"), ((1, 8), "b")):
        one.local.rates[:] = rates
        one.observe({name: np.float32(-2) for name in names})
        one.exchange()
    assert asked == ["stream"] * len(service.shards)
    c = one.center.values()
    np.testing.assert_array_equal(c["w"], 2 * (1 + 2))
    np.testing.assert_array_equal(c["b"], 2 * (4 + 8))


def test_a_call_that_is_made_twice_hears_nothing(serve):
    service = serve()
    for peer in service.shards:
        peer.disturb = lambda method: "twice"
    one = worker(service)
    for _ in range(3):
        one.parameters["w"] += 16
        one.exchange()
    np.testing.assert_array_equal(one.parameters["w"] + center_of(service), 3 * 16)
    assert one.center.version == 3


def test_a_shard_that_was_started_again_is_called_again(serve, tmp_path):
    service = serve(shards=1, storage=str(tmp_path / "store"))
    shard = service.shards[0]
    book, lives = shard.target._book, [True]
    check = book.check_latest

    def die(sender):
        if not lives:
            raise PeerLostError("the shard has died")
        check(sender)

    book.check_latest = die
    one = worker(service)
    one.parameters["w"] += 16
    one.exchange()
    shard.target.save()
    lives.clear()
    (visit,) = [pending for _, pending in one.member._streams._lines.values()]
    with pytest.raises(PeerLostError):
        visit.result(20)
    shard.target = service.make[0]()
    asked = asked_of(service)
    one.exchange()
    assert asked == ["stream"]
    np.testing.assert_array_equal(center_of(service), 4 + 2)
    np.testing.assert_array_equal(one.parameters["w"], 12 - 2)


def test_a_shard_that_dies_when_it_was_told_is_called_again(serve, tmp_path, monkeypatch):
    service = serve(shards=1, storage=str(tmp_path / "store"))
    shard = service.shards[0]
    one = worker(service)
    one.parameters["w"] += 16
    one.exchange()
    shard.target.save()
    old = shard.target

    def die(*_):
        shard.target = service.make[0]()
        raise PeerLostError("the shard has died")

    monkeypatch.setattr(old, "_swap", die)
    asked = asked_of(service)
    one.exchange()
    assert asked == ["stream"]
    assert shard.target is not old
    np.testing.assert_array_equal(center_of(service), 4 + 2)
    np.testing.assert_array_equal(one.parameters["w"], 12 - 2)


def test_a_request_that_is_too_long_for_a_pipe_is_a_call(serve, small):
    values = {f"p{k}": np.zeros(3, np.float32) for k in range(8000)}
    service = serve(RULES["sgd"], values, shards=1)
    one = worker(service, RULES["sgd"], 0, values)
    asked = asked_of(service)
    for _ in range(3):
        observed(one, -2)
        one.exchange()
    assert asked == ["stream"] * 3
    for c in one.center.values().values():
        np.testing.assert_array_equal(c, 3)


@pytest.mark.parametrize("left", ["killed", "with a child", "stopped"])
def test_it_leaves_with_the_worker(serve, lend, background, left):
    """Also where a child of it goes on with the pipes; who has stopped may still come back."""
    service = serve(shards=1)
    shard = service.shards[0].target
    process, address = lend(SLOTS, *["fork"] * (left == "with a child"))
    sender, nothing = Sender(0, 1, 1, 1, 1, 0.0), np.empty(0, np.uint8)
    message = Message(sender, nothing, 0, np.ones(1, bool), np.ones(1))
    visit = background(lambda: shard.stream(Request(message, False, address).pack()))
    while not shard._book.applied(sender):
        assert not visit.done()
    time.sleep(1.2)  # it looks after the worker meanwhile, more than once
    assert not visit.done()
    process.send_signal(signal.SIGSTOP if left == "stopped" else signal.SIGKILL)
    if left == "stopped":
        shard._book.check(Sender(0, 2, 1, 2, 2, 0.0))  # its next life
        with pytest.raises(TakenOverError, match="Rank 0 has been taken over"):
            visit.result(20)
    else:
        assert visit.result(20) is True
    np.testing.assert_array_equal(center_of(service), 1)
