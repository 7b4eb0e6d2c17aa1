"""AGN and model averaging through the memory of workers on the shard's machine."""

import gc
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from served import Service
from springline import AGN, ModelAverage, Worker
from springline.center import Layout, NonFiniteError, RoundTimeoutError, lent
from springline.center.errors import TakenOverError
from springline.center.plan import Plan, arrays_of
from springline.center.served import near, rooms, stream
from springline.center.served.merger import Merger
from springline.center.served.messages import Message, Sender
from springline.center.served.parts import Parts
from springline.center.served.peer import PeerLostError
from springline.center.served.rooms import split
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
    monkeypatch.setattr(near, "SMALL", 0)
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
        monkeypatch.setattr(lent if rule.synchronous else stream, "POSSIBLE", possible)
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
        by_memory = {"lend", "mean"} if rule.synchronous else {"stream"}
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
def test_what_is_not_finite_is_not_merged(serve, name, background):
    """Nothing of it in a round; of AGN's blocks those before it, as on one machine."""
    rule = RULES[name]
    service = serve(rule)
    workers = one, *others = [worker(service, rule, rank) for rank in range(WORKERS)]
    for each in workers:
        each.parameters["w"][:] = 1 if rule.synchronous else 3
        if rule.accumulates:
            each.observe({"w": np.full(SIZE, -2, np.float32)})
    (one.local.a if rule.accumulates else one.local.x).view(np.float32)[SIZE // 2] = np.nan
    going_on = [background(each.exchange) for each in others if rule.synchronous]
    with pytest.raises(NonFiniteError, match="'w' of rank 0 has NaN or Inf"):
        one.exchange()
    for future in going_on:
        future.result(30)
    c = one.center.values()["w"]
    np.testing.assert_array_equal(c[SIZE // 2 :], 1 if rule.synchronous else 0)
    np.testing.assert_array_equal(c[: SIZE // 4], 0 if name == "whole" else 1)
    if name == "sgd":  # all that was merged was adopted
        np.testing.assert_array_equal(one.parameters["w"], np.where(c == 1, 1, 3))
    assert one.center.version == int(rule.synchronous)
    one.take_center()
    if not rule.synchronous:
        one.observe({"w": np.full(SIZE, -2, np.float32)})
        one.exchange()
        assert one.center.version == 1


@pytest.mark.parametrize(("bad", "named"), [("u", "u"), ("v", "v"), ("uv", "u")])
def test_whoever_writes_it_what_is_not_finite_is_named(serve, bad, named):
    """The first, of several; each thread writes one of these, and the next round is whole."""
    rule = ModelAverage(workers=1, period=1)
    values = {name: np.ones(SIZE, np.float32) for name in "uv"}
    service = serve(rule, values, shards=1)
    one = worker(service, rule, 0, values)
    one.exchange()
    for name in bad:
        one.parameters[name][SIZE // 2] = np.inf
    with pytest.raises(NonFiniteError, match=f"'{named}' of rank 0 has NaN or Inf"):
        one.exchange()
    one.take_center()
    one.parameters["v"][:] = 3
    one.exchange()
    for name, c in one.center.values().items():
        np.testing.assert_array_equal(c, 1 if name == "u" else 3)


def test_what_is_not_finite_is_not_sent_as_a_message_either(serve, monkeypatch):
    """It is found when the shard turns out to be elsewhere."""
    rule = RULES["sgd"]
    service = serve(rule)
    monkeypatch.setattr(service.shards[0].target, "_visit", lambda *_: False)
    one = worker(service, rule)
    gradient = np.ones(SIZE, np.float32)
    gradient[-1] = np.nan  # more pieces come before than there are slots
    one.observe({"w": gradient, "b": np.float32(1)})
    with pytest.raises(NonFiniteError, match="'w' of rank 0 has NaN or Inf"):
        one.exchange()
    assert [peer.target.rows()[0][0].exchanges for peer in service.shards] == [0, 0]
    np.testing.assert_array_equal(one.center.values()["w"], 0)


@pytest.mark.parametrize("name", ["average", "sgd"])
def test_one_shard_is_here_and_one_is_not(serve, name, monkeypatch, together):
    rule = RULES[name]
    service = serve(rule)
    for method, answer in (("_visit", False), ("lend", None)):
        monkeypatch.setattr(service.shards[1].target, method, lambda *_, a=answer: a)
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
    assert workers[0].member._rounds is None or workers[0].member._rounds._rooms.near == {0}
    tried = "lend" if rule.synchronous else "stream"
    assert (asked[1].count(tried), asked[1].count("mean")) == (WORKERS, 0)


def message(rank, number, value):
    sender = Sender(rank, 1, number, number, number, 0.0)
    data = np.full(SIZE, value, np.float32).view(np.uint8)
    return Message(sender, data, 1, np.ones(2, bool), np.ones(2))


def test_nobody_adopts_pieces_of_two_rounds(serve, monkeypatch, together):
    """A round that begins while we adopt the last one: we take the whole of it, as a message."""
    rule = ModelAverage(workers=3, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    one, other = (worker(service, rule, rank, {"w": VALUES["w"]}) for rank in range(2))
    plain, adopted = Parts.adopt_mean, []

    def adopt(parts, *arguments):
        plain(parts, *arguments)
        if parts.local is one.local:
            adopted.append(arguments)
        if parts.local is one.local and len(adopted) == 1:
            shard.contribute(message(2, 2, 7.0), 2)
            shard.reduce(2, [2], message(2, 2, 0).sender)

    monkeypatch.setattr(Parts, "adopt_mean", adopt)
    asked = asked_of(service)
    one.parameters["w"][:] = 3
    together(one.exchange, other.exchange)
    np.testing.assert_array_equal(one.parameters["w"], 7)
    assert "reduce" in asked


def test_who_is_alone_in_a_round_has_its_mean(serve, monkeypatch):
    """It need not adopt it, unless the shard has gone on meanwhile."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    one = worker(service, rule, 0, {"w": VALUES["w"]})
    one.parameters["w"][:] = np.arange(SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(Parts, "adopt_mean", lambda *_: pytest.fail("it has it"))
        one.exchange()
    for values in (one.parameters["w"], one.center.values()["w"]):
        np.testing.assert_array_equal(values, np.arange(SIZE))

    def go_on(method):
        if method == "mean":
            shard.contribute(message(1, 3, 7.0), 3)
            shard.reduce(3, [1], message(1, 3, 0).sender)

    service.shards[0].disturb = go_on
    one.exchange()
    np.testing.assert_array_equal(one.parameters["w"], 7)


def test_a_room_that_may_still_be_read_is_not_used_again(serve):
    """A round is given up; should others close it all the same, it is with what was there."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    one, other = (
        worker(service, rule, rank, {"w": VALUES["w"]}, timeout=timeout)
        for rank, timeout in enumerate((0.2, 30))
    )
    one.parameters["w"][:] = 1
    with pytest.raises(RoundTimeoutError):
        one.exchange()
    _, room = shard._rooms[0]
    kept = room.memory[: 4 * SIZE].view(np.float32)
    one.member._rounds._contribute(Parts(one.center.plan, one.center.parts, rule, 0, one.local), 2)
    one.parameters["w"][:] = 100
    one.member._rounds._contribute(Parts(one.center.plan, one.center.parts, rule, 0, one.local), 3)
    np.testing.assert_array_equal(kept, 1)
    assert len(shard._rooms) == 1
    other.parameters["w"][:] = 5
    sender = other.member._rounds._contribute(
        Parts(other.center.plan, other.center.parts, rule, 1, other.local), 1
    ).sender
    assert shard.mean(1, [0, 1], sender)[1] == 1
    np.testing.assert_array_equal(other.center.values()["w"], 3)


def test_a_shard_is_started_again_between_contribution_and_mean(serve, tmp_path, together):
    """What it had been sent is gone; all send it again, as messages, and go on through memory."""
    rule = RULES["average"]
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    lock, calls = threading.Lock(), []

    def restart(method):
        with lock:
            calls.append(method)
            if method == "mean" and calls.count("mean") == 1:
                service.shards[0].target = service.make[0]()

    service.shards[0].disturb = restart
    for number in range(2):
        for one in workers:
            one.parameters["w"][:] = one.rank + number
        together(*[one.exchange for one in workers])
        for one in workers:
            np.testing.assert_array_equal(one.parameters["w"], 1 + number)
    assert calls.count("contribute") >= WORKERS
    assert calls.count("lend") == 2 * WORKERS


def test_a_round_asks_the_head_once_and_each_shard_once(serve, together):
    rule = RULES["average"]
    service = serve(rule)
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    together(*[one.exchange for one in workers])
    of_head, of_shards = [], asked_of(service)
    service.head.disturb = lambda method: of_head.append(method) if method != "beat" else None
    for number in range(3):
        for one in workers:
            one.parameters["w"][:] = one.rank * number
        together(*[one.exchange for one in workers])
        np.testing.assert_array_equal(workers[0].center.values()["w"], number)
    assert of_head == ["contribute"] * 3 * WORKERS
    assert sorted(set(of_shards)) == ["mean", "read"]
    assert of_shards.count("mean") == 3 * WORKERS * len(service.shards)


def test_a_shard_dies_when_it_has_just_lent_a_room(serve, monkeypatch):
    """What it has lent cannot be reached; the next round goes through memory again."""
    rule = ModelAverage(workers=1, period=1)
    service = serve(rule)
    one = worker(service, rule)
    calls = []

    def lose(method):
        calls.append(method)
        if calls.count("contribute") == 1 and method == "contribute":
            raise PeerLostError("the shard has died")

    def fail(*_, **__):
        raise OSError("no such process")

    service.shards[0].disturb = lose
    with monkeypatch.context() as patch:
        patch.setattr(rooms, "borrow", fail)
        one.exchange()
    assert one.member._rounds._rooms.near == {0}  # the other cannot be reached, and has not died
    one.parameters["w"][:] = 3
    one.exchange()
    np.testing.assert_array_equal(one.center.values()["w"], 3)
    assert calls == ["lend", "contribute", "contribute", "reduce", "lend", "mean", "read"]


def test_a_shard_is_started_again_between_two_rounds(serve, tmp_path, together):
    """No call is lost by that; what is written into rooms of its last life is not there."""
    rule = RULES["average"]
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    together(*[one.exchange for one in workers])
    service.shards[0].target.save()
    service.shards[0].target = service.make[0]()
    calls = []
    service.shards[0].disturb = calls.append
    for number in range(1, 4):
        for one in workers:
            one.parameters["w"][:] = one.rank * number
        together(*[one.exchange for one in workers])
        for one in workers:
            np.testing.assert_array_equal(one.parameters["w"], number)
    assert calls.count("lend") == WORKERS
    assert calls[-WORKERS:] == ["mean"] * WORKERS


def test_a_call_that_was_under_way_for_long_takes_no_room_away(serve):
    """It is of an earlier exchange, or of an earlier life."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    earlier, later = message(0, 1, 1.0), message(0, 2, 0)
    offer = shard.lend(later.sender, lent.machine())
    shard.contribute(earlier, 1)
    assert shard.lend(earlier.sender, lent.machine()) is None
    assert shard.lend(later.sender, lent.machine()) == offer
    shard.mean(1, [0], later.sender)  # and so it is this life's now
    with pytest.raises(TakenOverError):
        shard.contribute(replace(earlier, sender=replace(earlier.sender, incarnation=0)), 2)
    assert shard._rooms[0][1].address == offer.room
    shard.contribute(later, 2)
    assert not shard._rooms


def test_the_last_exchange_may_be_when_no_thread_can_be_started_any_more(serve, monkeypatch):
    """Python 3.12 refuses it when the interpreter is about to end."""

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    rule = ModelAverage(workers=1, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    one = worker(service, rule, 0, {"w": VALUES["w"]})
    one.parameters["w"][:] = np.arange(SIZE)
    monkeypatch.setattr(rooms, "threading", SimpleNamespace(Thread=Refused))
    one.exchange()
    np.testing.assert_array_equal(one.center.values()["w"], np.arange(SIZE))


def test_what_was_written_for_the_last_round_is_not_of_this_one(serve, together):
    """Not even if nobody knows any more who is in it."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    workers = [worker(service, rule, rank, {"w": VALUES["w"]}) for rank in range(2)]
    together(*[one.exchange for one in workers])
    workers[1].parameters["w"][:] = 7
    member = workers[1].member
    head = member._rounds._contribute(member._parts, 2)
    service.shards[0].target.mean(2, [], head.sender)
    np.testing.assert_array_equal(workers[0].center.values()["w"], 7)


def test_what_is_being_written_is_not_of_a_round(serve, monkeypatch):
    """Nor is it of the last one any more."""
    rule = ModelAverage(workers=1, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    one = worker(service, rule, 0, {"w": VALUES["w"]})
    one.exchange()
    plain, seen = Parts.write_x, []

    def write(parts, *arguments):
        seen.append(int(split(shard._rooms[0][1].memory)[1][0]))
        plain(parts, *arguments)

    monkeypatch.setattr(Parts, "write_x", write)
    assert split(shard._rooms[0][1].memory)[1][0] == 1
    one.exchange()
    assert set(seen) == {0}
    assert split(shard._rooms[0][1].memory)[1][0] == 2


def restarts(service, monkeypatch, method, piece):
    """Let the first shard be started again, from its storage, the first time it gets to a piece."""
    old, plain = service.shards[0].target, getattr(Merger, method)

    def die(merger, *arguments):
        here = piece in [a for a in arguments if isinstance(a, int)]
        if merger is old._merger and (here or service.shards[0].target is not old):
            time.sleep(0.3)  # until workers have adopted what there was
            service.shards[0].target = service.make[0]()
            raise PeerLostError("the shard has died")
        return plain(merger, *arguments)

    monkeypatch.setattr(Merger, method, die)
    return lambda: service.shards[0].target is not old


def test_a_shard_is_started_again_in_the_middle_of_a_mean(serve, tmp_path, monkeypatch, together):
    """Some have adopted its first pieces; what they send again is what they had contributed."""
    rule = RULES["average"]
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    together(*[one.exchange for one in workers])
    rooms = workers[0].member._rounds._rooms
    monkeypatch.setattr(rooms, "follow", lambda parts, calls, _: dict.fromkeys(calls, 0))
    has_died = restarts(service, monkeypatch, "merge_round", 2)
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


WRITES = """
import json, sys, time
import numpy as np
from springline.center.lent import Address, borrow
room = borrow(Address(**json.loads(sys.argv[1])), populate=True)
room[: len(room) // 2].view(np.float32)[:] = 100
print("half", flush=True)
time.sleep(600)
"""


def test_a_worker_is_killed_while_it_contributes(serve):
    """What it has written does not count, and its next life has a room of its own."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    offer = shard.lend(message(0, 1, 0).sender, lent.machine())
    command = [sys.executable, "-c", WRITES, json.dumps(asdict(offer.room))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with process.stdout:
            assert process.stdout.readline() == "half\n"
    finally:
        process.kill()
        process.wait()
    assert shard._rooms[0][1].memory[:4].view(np.float32) == 100
    two = worker(service, rule, 1, {"w": VALUES["w"]})
    for number in range(1, 4):
        two.parameters["w"][:] = number
        two.exchange()
        np.testing.assert_array_equal(two.center.values()["w"], number)
    again = shard.lend(message(0, 2, 0).sender, lent.machine())
    assert shard.mean(4, [0, 1], message(0, 2, 0).sender) == [0, 1]
    assert again.room.token != offer.room.token
    assert not shard._rooms[0][1].memory.any()
    assert len(shard._rooms) == 2


def test_the_memory_of_a_shard_that_has_died_is_not_adopted(serve):
    rule = ModelAverage(workers=1, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    one = worker(service, rule, 0, {"w": VALUES["w"]})
    one.exchange()
    token = service.shards[0].target._lent.address.token
    rooms, parts = one.member._rounds._rooms, one.member._parts
    assert rooms.adopt(parts, 0, 0, token, 1)
    one.parameters["w"][:] = 4
    assert not rooms.adopt(parts, 0, 0, "another", 1)
    np.testing.assert_array_equal(one.parameters["w"], 4)


def test_who_cannot_use_a_room_has_none(serve, together, monkeypatch):
    """It is on another machine that looks the same."""
    rule = RULES["average"]
    service = serve(rule)
    monkeypatch.setattr("springline.center.served.rooms.borrow", elsewhere)
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    for one in workers:
        one.parameters["w"][:] = one.rank
    together(*[one.exchange for one in workers])
    np.testing.assert_array_equal(workers[0].parameters["w"], 1)
    assert [peer.target._rooms for peer in service.shards] == [{}, {}]


def elsewhere(*_, **__):
    raise OSError("no such process")


def test_rooms_are_let_go(serve, together):
    rule = RULES["average"]
    service = serve(rule)
    before = open_files()
    workers = [worker(service, rule, rank) for rank in range(WORKERS)]
    for _ in range(3):
        together(*[one.exchange for one in workers])
    own = WORKERS * len(service.shards) * 2  # the shards': memory, and its mapping
    assert open_files() > before + own
    for one in workers:
        one.member.leave()
    assert open_files() == before + own


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
    for shard in service.shards:
        shard.target._borrowed.clear()
    deadline = time.monotonic() + 10  # the shard may still be about to let go
    while open_files() > before:
        assert time.monotonic() < deadline


def open_files():
    gc.collect()  # what other tests have left
    return len(list(Path("/proc/self/fd").iterdir()))
