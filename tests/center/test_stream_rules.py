"""AGN and model averaging through the memory of workers on the shard's machine."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from served import Service
from springline import AGN, ModelAverage, Worker
from springline.center import Layout, NonFiniteError, lent
from springline.center.plan import Plan, arrays_of
from springline.center.served import near, stream
from springline.center.served.merger import Merger
from springline.center.served.messages import Message, Sender
from springline.center.served.near import Address, Ring
from springline.center.served.peer import PeerLostError
from springline.rules import SGD, Adam, Momentum
from springline.torch.outer import TorchOuter

WORKERS = 3
SIZE = 1_000_000
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(7, np.float32)}
BUFFERS = {"mean": np.zeros(SIZE // 4, np.float32)}


@dataclass(frozen=True)
class Whole(SGD):
    """An outer optimizer that wants to see whole parameters."""

    elementwise = False

    def step(self, name, c, g, state, rate, work):
        assert c.shape == g.shape == VALUES[name].shape
        super().step(name, c, g / (1 + np.abs(g).max()), state, rate, work)


RULES = {
    "average": ModelAverage(workers=WORKERS, period=1),
    "sgd": AGN(workers=WORKERS, period=1, optimizer=SGD(0.5)),
    "momentum": AGN(workers=WORKERS, period=1, optimizer=Momentum(0.5)),
    "adam": AGN(workers=WORKERS, period=1, optimizer=Adam(0.5)),
    "whole": AGN(workers=WORKERS, period=1, optimizer=Whole(0.5)),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("springline.center.served.peer._PAUSE", 0.001)
    monkeypatch.setattr(stream, "_LOOK", 0.05)
    monkeypatch.setattr(stream, "SMALL", 0)
    monkeypatch.setattr(near, "SLOT", 2**18)  # a block


@pytest.fixture
def serve():
    services = []

    def serve(rule, values=VALUES, buffers=None, **options):
        given = Layout.of(values, buffers), rule, values | (buffers or {})
        options = {"use_locking": True, "restore": None, "shards": 2} | options
        services.append(Service(*given, **options))
        return services[-1]

    yield serve
    for service in services:
        service.close()


def worker(service, rule, rank=0, values=VALUES, **options):
    options = {"synchronous": False, "timeout": 30} | options
    return Worker(values, rule, service.open(), rank, **options)


def asked_of(service):
    asked = []
    for peer in service.shards:
        peer.disturb = asked.append
    return asked


def noise(*seed):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


@pytest.mark.parametrize("use_locking", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_the_same_comes_out_as_by_messages(serve, name, use_locking, monkeypatch, together):
    rule, found = RULES[name], []
    for possible in (True, False):
        monkeypatch.setattr(stream, "POSSIBLE", possible)
        values = VALUES | {"w": noise(9)}
        service = serve(rule, values, BUFFERS, use_locking=use_locking)
        workers = [worker(service, rule, rank, values, buffers=BUFFERS) for rank in range(WORKERS)]
        asked = asked_of(service)
        for number in range(3):
            for one in workers:
                one.parameters["w"] += noise(number, one.rank)
                one.buffers["mean"] += one.rank
                if rule.accumulates:
                    one.observe({"w": noise(number, one.rank, 1)})
                if rule.accumulates and one.rank == number:  # else it has none
                    one.observe({"b": np.float32(3)})
            if rule.synchronous:
                together(*[one.exchange for one in workers])
            else:
                for one in workers:
                    one.exchange()
        by_memory = {"take", "give"} if rule.synchronous else {"stream"}
        by_message = {"contribute", "reduce"} if rule.synchronous else {"exchange"}
        assert by_memory <= set(asked) if possible else not by_memory & set(asked)
        assert by_message <= set(asked) if not possible else not by_message & set(asked)
        c = workers[0].center.values()
        assert np.abs(c["w"] - values["w"]).max() > 0.01
        found.append([*c.values(), *(one.local.x.view(np.float32) for one in workers)])
    for through_memory, by_message in zip(*found, strict=True):
        np.testing.assert_array_equal(through_memory, by_message)


def test_a_parameter_that_fits_into_no_slot_goes_as_a_message(serve, monkeypatch):
    monkeypatch.setattr(stream, "LARGEST", 4 * SIZE - 1)
    for name, method in (("whole", "exchange"), ("sgd", "stream")):
        service = serve(RULES[name], shards=1)
        one = worker(service, RULES[name])
        asked = asked_of(service)
        one.observe(dict.fromkeys(VALUES, np.float32(1)))
        one.exchange()
        assert set(asked) == {method}


def test_a_step_is_counted_once_whoever_comes_in_between():
    """Two workers' pieces in turn do what one worker after the other does, to the bit."""
    rule = RULES["adam"]
    found = []
    for in_turn in (True, False):
        plan = Plan.of(Layout.of(VALUES), rule, use_locking=True)
        runs = list(plan.shards)
        center = plan.layout.allocate()
        state = np.zeros(plan.state_nbytes, np.uint8)
        merger = Merger(plan, rule, runs, center, arrays_of(plan.state, state))
        order = [(rank, k) for k in range(merger.pieces) for rank in range(2)]
        for rank, k in order if in_turn else sorted(order):
            sender = Sender(rank, 1, 1, 1, 1, 0.0)
            message = Message(sender, center[:0], 1, np.ones(2, bool), np.full(2, 0.5))
            slot = np.full(4 * SIZE, rank + 1.0, np.float32).view(np.uint8)
            assert merger.swap(k, slot, message, before=False)[1]
        assert merger.pieces > 3
        found.append((center.view(np.float32).copy(), state))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert len(np.unique(found[0][0][:SIZE])) == 1  # all elements have taken the same steps


@pytest.mark.parametrize("name", ["average", "sgd", "whole"])
def test_nothing_is_merged_of_what_is_not_finite(serve, name, background):
    rule = RULES[name]
    service = serve(rule)
    workers = one, *others = [worker(service, rule, rank) for rank in range(WORKERS)]
    for each in workers:
        each.parameters["w"][:] = 1
        if rule.accumulates:
            each.observe({"w": np.ones(SIZE, np.float32)})
    (one.local.a if rule.accumulates else one.local.x).view(np.float32)[SIZE // 2] = np.nan
    going_on = [background(each.exchange) for each in others if rule.synchronous]
    with pytest.raises(NonFiniteError, match="'w' of rank 0 has NaN or Inf"):
        one.exchange()
    for future in going_on:
        future.result(30)
    c = one.center.values()["w"]
    np.testing.assert_array_equal(c, 1 if rule.synchronous else 0)
    assert one.center.version == int(rule.synchronous)


@pytest.mark.parametrize("name", ["average", "sgd"])
def test_one_shard_is_here_and_one_is_not(serve, name, monkeypatch, together):
    rule = RULES[name]
    service = serve(rule)
    monkeypatch.setattr(service.shards[1].target, "_visit", lambda *_: False)
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    asked = [[], []]
    for peer, into in zip(service.shards, asked, strict=True):
        peer.disturb = into.append
    for _ in range(2):
        for one in workers:
            one.parameters["w"][:] = one.rank
            if rule.accumulates:
                one.observe({"w": np.full(SIZE, -2, np.float32)})
        together(*[one.exchange for one in workers])
    c = workers[0].center.values()["w"]
    np.testing.assert_array_equal(c, 1 if rule.synchronous else 2 * WORKERS)
    assert not {"exchange", "contribute", "reduce"} & set(asked[0])
    tried = "take" if rule.synchronous else "stream"
    assert (asked[1].count(tried), asked[1].count("give")) == (WORKERS, 0)


def shard_of(service):
    return service.shards[0].target


def message(rank, number, value):
    sender = Sender(rank, 1, number, number, number, 0.0)
    data = np.full(SIZE, value, np.float32).view(np.uint8)
    return Message(sender, data, 1, np.ones(2, bool), np.ones(2))


def contribute(shard, message, number):
    """Take a message as one that came through memory."""
    room = shard._slots.room(len(message.data))
    room[:] = message.data
    shard._slots.take(replace(message, data=room), number)


@pytest.fixture
def half_given(serve, tmp_path, background):
    """A shard that has given a worker the first piece of a round's mean, and merged no other."""
    service = serve(RULES["average"], {"w": VALUES["w"]}, shards=1, storage=str(tmp_path / "store"))
    shard, ring = shard_of(service), Ring(2**18)
    for rank in range(2):
        contribute(shard, message(rank, 1, 2.0 + rank), 1)
    address = ring.open()
    asks = background(lambda: shard.give(1, [0, 1], message(0, 1, 0).sender, 0, address))
    try:
        ring.say()
        assert ring.hear() == bytes([1])
        assert ring.slots[0].view(np.float32)[0] == 2.5
        assert shard._center.view(np.float32)[-1] == 0
        yield service, shard, ring, asks
    finally:
        ring.close()
    asks.result(20)


def test_a_mean_that_is_half_given_is_read_and_saved_as_a_whole(half_given):
    service, shard, ring, _ = half_given
    shard.save()
    np.testing.assert_array_equal(service.make[0]()._center.view(np.float32), 2.5)
    assert service.make[0]()._slots.reduced == 1
    np.testing.assert_array_equal(shard.read().data.view(np.float32), 2.5)
    ring.say()
    assert ring.hear() == bytes([1])
    np.testing.assert_array_equal(ring.slots[1].view(np.float32), 2.5)


def test_nobody_gets_pieces_of_two_rounds(half_given):
    _, shard, ring, asks = half_given
    shard.contribute(message(1, 2, 7.0), 2)
    shard.reduce(2, [1], message(1, 2, 0).sender)
    ring.say()
    assert asks.result(20) is False  # it is to ask for the whole
    np.testing.assert_array_equal(shard.read().data.view(np.float32), 7)


def test_who_asks_for_a_round_while_the_next_is_half_given_gets_that_one(half_given, background):
    _, shard, *_ = half_given
    contribute(shard, message(1, 2, 7.0), 2)
    ring = Ring(2**18)
    address = ring.open()
    gives = background(lambda: shard.give(2, [1], message(1, 2, 0).sender, 0, address))
    try:
        ring.say()
        assert ring.hear() == bytes([1])
        assert shard._center.view(np.float32)[-1] != 7
        mean = shard.reduce(1, [0, 1], message(0, 1, 0).sender).data
        np.testing.assert_array_equal(mean.view(np.float32), 7)
        contribute(shard, message(1, 2, 99.0), 2)
        ring.say()
        assert ring.hear() == bytes([1])
        np.testing.assert_array_equal(ring.slots[1].view(np.float32), 7)
    finally:
        ring.close()
    gives.result(20)


def test_what_comes_late_for_a_round_that_is_being_reduced_is_not_taken(half_given):
    _, shard, *_ = half_given
    for rank in (1, 2):  # nor does anybody else get the room of what is there
        contribute(shard, message(rank, 1, 100.0), 1)
    np.testing.assert_array_equal(shard.read().data.view(np.float32), 2.5)


def test_a_shard_is_started_again_in_the_middle_of_a_round(serve, tmp_path, together, caplog):
    """What it had been sent is gone; all send it again, as messages, and go on through memory."""
    rule = RULES["average"]
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    lock, calls = threading.Lock(), []

    def restart(method):
        with lock:
            calls.append(method)
            if method == "give" and calls.count("give") == 1:
                service.shards[0].target = service.make[0]()

    service.shards[0].disturb = restart
    for number in range(2):
        for one in workers:
            one.parameters["w"][:] = one.rank + number
        together(*[one.exchange for one in workers])
        for one in workers:
            np.testing.assert_array_equal(one.parameters["w"], 1 + number)
    assert (calls.count("contribute"), calls.count("reduce")) != (0, 0)
    assert calls.count("take") == 2 * WORKERS


def restarts(service, monkeypatch, method, piece):
    """Let the first shard be started again, from its storage, the first time it gets to a piece."""
    old, plain = service.shards[0].target, getattr(Merger, method)

    def die(merger, number, *arguments):
        if merger is old._merger and (number == piece or service.shards[0].target is not old):
            service.shards[0].target = service.make[0]()
            raise PeerLostError("the shard has died")
        return plain(merger, number, *arguments)

    monkeypatch.setattr(Merger, method, die)
    return lambda: service.shards[0].target is not old


def test_what_was_given_of_a_mean_is_the_mean(serve, tmp_path, monkeypatch, together):
    """A shard is started again when some have the mean's first pieces and others have none."""
    rule = RULES["average"]
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    has_died = restarts(service, monkeypatch, "show", 2)
    for one in workers:
        one.parameters["w"][:] = np.arange(SIZE) + one.rank
    together(*[one.exchange for one in workers])
    assert has_died()
    for one in workers:
        np.testing.assert_array_equal(one.parameters["w"], np.arange(SIZE) + 1)


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_a_shard_is_started_again_in_the_middle_of_a_parameter(serve, tmp_path, monkeypatch, name):
    """It has not counted the step of the parameter; what the worker had an answer to is lost."""
    rule = RULES[name]
    service = serve(rule, {"w": VALUES["w"]}, shards=1, storage=str(tmp_path / "store"))
    one = worker(service, rule, 0, {"w": VALUES["w"]})
    has_died = restarts(service, monkeypatch, "swap", 2)
    one.observe({"w": np.ones(SIZE, np.float32)})
    one.exchange()
    assert has_died()
    c = one.center.values()["w"]
    np.testing.assert_array_equal(c[: 2**17], 0)
    np.testing.assert_allclose(c[2**17 :], -0.5, rtol=1e-5)
    np.testing.assert_allclose(one.parameters["w"], -0.5, rtol=1e-5)


def test_many_small_parameters_fit_into_a_piece(serve, monkeypatch):
    """An answer is a byte."""
    monkeypatch.setattr(near, "SLOT", 2**20)
    values = {f"p{k}": np.zeros(3, np.float32) for k in range(800)}
    service = serve(RULES["sgd"], values, shards=1)
    one = worker(service, RULES["sgd"], 0, values)
    asked = asked_of(service)
    one.observe(dict.fromkeys(values, np.float32(-2)))
    one.exchange()
    assert set(asked) == {"stream"}
    for x, c in zip(one.parameters.values(), one.center.values().values(), strict=True):
        np.testing.assert_array_equal([*x, *c], 1)


TAKES = """
import json, time
from dataclasses import asdict
from springline.center.served.near import Ring
ring = Ring(2**18)
address = ring.open()
ring.say()
print(json.dumps([asdict(address.memory), address.there, address.back]), flush=True)
time.sleep(600)
"""


def test_a_worker_is_killed_while_it_contributes(serve, background):
    """Others' rounds go on; the room of what it had sent is used again, and there is no more."""
    rule = RULES["average"]
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = shard_of(service)
    command = [sys.executable, "-c", TAKES]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with process.stdout:
            memory, there, back = json.loads(process.stdout.readline())
        address = Address(lent.Address(**memory), tuple(there), tuple(back))
        waits = background(lambda: shard.take(message(0, 1, 0), 1, address))
        while not shard._slots._rooms:
            assert not waits.done()
    finally:
        process.kill()
        process.wait()
    assert waits.result(20) is True
    assert len(shard._slots._free) == 1
    one = worker(service, rule, 1, {"w": VALUES["w"]})
    for number in range(1, 6):
        one.parameters["w"][:] = number
        one.exchange()
        assert one.center.values()["w"][-1] == number
    assert len(shard._slots._rooms) == len(shard._slots._free) == 1


@pytest.mark.parametrize("method", ["keep", "show"])
def test_a_shard_dies_in_the_middle(serve, monkeypatch, together, method):
    """A contribution begins anew, and a mean is given on from where it was."""
    rule = RULES["average"]
    service = serve(rule)
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    plain, done = getattr(Merger, method), []

    def die(merger, piece, *arguments):
        done.append(piece)
        if piece == 2 and done.count(piece) in (1, 3):
            raise PeerLostError("the shard has died")
        return plain(merger, piece, *arguments)

    monkeypatch.setattr(Merger, method, die)
    for one in workers:
        one.parameters["w"][:] = np.arange(SIZE) + one.rank
    together(*[one.exchange for one in workers])
    for one in workers:
        np.testing.assert_array_equal(one.parameters["w"], np.arange(SIZE) + 1)
    pieces = sum(peer.target._merger.pieces for peer in service.shards)
    assert len(done) - WORKERS * pieces == (6 if method == "keep" else 2)


def test_a_torch_optimizer_keeps_nothing_of_the_memory(serve):
    inner = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
    outer = TorchOuter(inner, dict.fromkeys(VALUES, inner.defaults))
    rule = AGN(workers=1, period=1, optimizer=outer)
    service = serve(rule)
    before = open_files()
    one = worker(service, rule)
    asked = asked_of(service)
    for _ in range(3):
        one.observe(dict.fromkeys(VALUES, np.float32(-1)))
        one.exchange()
    assert set(asked) == {"stream"}
    np.testing.assert_array_equal(one.parameters["w"], 1 + 1.5 + 1.75)
    one.member.leave()
    deadline = time.monotonic() + 10  # the shard may still be about to let go
    while open_files() > before:
        assert time.monotonic() < deadline


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))
