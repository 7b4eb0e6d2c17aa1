"""A shard stays in a worker's memory from one exchange to the next."""

import fcntl
import os
import signal
import threading
import time

import numpy as np
import pytest
from streamed import RULES, asked_of, center_of, open_files

from served import worker
from springline import ElasticAverage
from springline.center.errors import NonFiniteError, TakenOverError
from springline.center.served.messages import Message, Sender
from springline.center.served.near import SLOT, SLOTS, Request, Ring
from springline.center.served.peer import PeerLostError

RULE = ElasticAverage(workers=3, period=1, moving_rate=0.25)
VALUES = {"w": np.zeros(SLOTS * SLOT // 4, np.float32)}  # of one shard: as many pieces as slots


def room_of_a_pipe():
    ends = os.pipe()
    size = fcntl.fcntl(ends[1], fcntl.F_GETPIPE_SZ)
    for end in ends:
        os.close(end)
    return size


def request(address, life=1):
    """What the rank 0 asks first, in one of its lives, and who asks."""
    sender, nothing = Sender(0, life, 1, 1, 1, 0.0), np.empty(0, np.uint8)
    message = Message(sender, nothing, 0, np.ones(1, bool), np.ones(1))
    return Request(message, False, address).pack(), sender


def observed(one, value):
    if one.rule.accumulates:
        one.observe(dict.fromkeys(one.parameters, np.float32(value)))
    else:
        for x in one.parameters.values():
            x += value


def exchanges_are_applied_once(service):
    """What a worker gives, the center has."""
    one = worker(service)
    for _ in range(4):
        one.parameters["w"] += 16
        one.exchange()
    np.testing.assert_array_equal(one.parameters["w"] + center_of(service), 4 * 16)
    assert one.center.version == 4


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
    exchanges_are_applied_once(service)


def test_the_second_of_two_calls_is_answered(serve, monkeypatch):
    """At once, and that is taken for the answer of the first."""
    service = serve(shards=1)
    shard, ask = service.shards[0], service.shards[0].ask

    def twice(method, *arguments):
        first = ask(method, *arguments)
        return ask(method, *arguments) if method == "stream" else first

    monkeypatch.setattr(shard, "ask", twice)
    exchanges_are_applied_once(service)


def test_an_earlier_life_does_not_come_in_between(serve, background, monkeypatch):
    """It has passed its check when the next life comes; and that one's call is made twice."""
    service = serve(shards=1)
    shard = service.shards[0].target
    rings = [Ring(), Ring()]
    for ring in rings:
        ring.open()
    (before, _), (now, sender) = (request(ring.address, 1 + k) for k, ring in enumerate(rings))
    check, late, go_on = shard._check_ready, threading.Event(), threading.Event()

    def wait():
        check()
        if not late.is_set():
            late.set()
            assert go_on.wait(20)

    monkeypatch.setattr(shard, "_check_ready", wait)
    earlier = background(lambda: shard.stream(before))
    assert late.wait(20)
    visit = background(lambda: shard.stream(now))
    for _ in rings[1].slots:
        rings[1].say()
    while not shard._book.applied(sender):
        assert not visit.done()
    go_on.set()
    with pytest.raises(TakenOverError):
        earlier.result(20)
    assert background(lambda: shard.stream(now)).result(20) is True
    assert not visit.done()
    for ring in rings:
        ring.close()
    assert visit.result(20) is True


def test_what_a_worker_does_not_send_ends_the_visit(serve, small):
    """The shard waits for a piece that is not finite; the next exchange is another one."""
    rule = RULES["sgd"]
    service = serve(rule, shards=1)
    one = worker(service, rule)
    asked = asked_of(service)
    gradient = np.full_like(VALUES["w"], -2)
    observed(one, -2)
    one.exchange()
    gradient[-1] = np.nan
    one.observe({"w": gradient})
    with pytest.raises(NonFiniteError):
        one.exchange()
    before = center_of(service)
    observed(one, -2)
    one.exchange()
    np.testing.assert_array_equal(center_of(service), before + 1)
    assert asked.count("stream") == 2


@pytest.mark.parametrize("where", ["looks", "tells"])
def test_a_worker_that_is_interrupted_keeps_nothing_open(serve, monkeypatch, where):
    service = serve(shards=1)
    one = worker(service)
    one.exchange()
    open_before = open_files()

    def interrupt(*_):
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            if where == "tells":
                patch.setattr(Ring, "ask", interrupt)
            else:
                (visit,) = [pending for _, pending in one.member._streams._lines.values()]
                visit.result = interrupt
                del visit
            with pytest.raises(KeyboardInterrupt):
                one.exchange()
        one.exchange()
    deadline = time.monotonic() + 10  # the shard may still be about to leave
    while open_files() > open_before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    values = {f"p{k}": np.zeros(3, np.float32) for k in range(room_of_a_pipe() // 9)}
    service = serve(RULES["sgd"], values, shards=1)
    one = worker(service, RULES["sgd"], 0, values)
    asked = asked_of(service)
    for _ in range(3):
        observed(one, -2)
        one.exchange()
    assert asked == ["stream"] * 3
    for c in one.center.values().values():
        np.testing.assert_array_equal(c, 3)


@pytest.mark.parametrize("more", [0, 1])
def test_nobody_waits_at_a_full_pipe(background, more):
    """Whoever is to read from it may have died."""
    ring = Ring()
    ring.open()
    told = ring.ask(bytes(room_of_a_pipe() - 4 - SLOTS + more))
    assert told is (more == 0)
    if told:
        background(lambda: [ring.say() for _ in range(SLOTS)]).result(20)
    ring.close()


@pytest.mark.parametrize("left", ["killed", "with a child", "stopped"])
def test_it_leaves_with_the_worker(serve, lend, background, left):
    """Also where a child of it goes on with the pipes; who has stopped may still come back."""
    service = serve(shards=1)
    shard = service.shards[0].target
    process, address = lend(SLOTS, *["fork"] * (left == "with a child"))
    packed, sender = request(address)
    visit = background(lambda: shard.stream(packed))
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
