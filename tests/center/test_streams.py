"""Exchanges with shards of the same machine: through memory, piece by piece."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from served import Lost, Service
from springline import ElasticAverage, Worker
from springline.center import Layout, NonFiniteError
from springline.center.errors import TakenOverError
from springline.center.lent import borrow
from springline.center.served import stream
from springline.center.served.messages import Message, Sender
from springline.center.served.near import SLOT, SLOTS, Guest, Ring
from springline.center.served.parts import Parts
from springline.center.served.peer import PeerLostError

WORKERS = 3
SIZE = 9_000_000  # of each shard two rings full, and more
VALUES = {"w": np.zeros(SIZE, np.float32)}
RULE = ElasticAverage(workers=WORKERS, period=1, moving_rate=0.25)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("springline.center.served.peer._PAUSE", 0.001)
    monkeypatch.setattr(stream, "_LOOK", 0.05)


@pytest.fixture
def serve():
    services = []

    def serve(rule=RULE, values=VALUES, buffers=None, **options):
        given = Layout.of(values, buffers), rule, values | (buffers or {})
        options = {"use_locking": True, "restore": None, "shards": 2} | options
        services.append(Service(*given, **options))
        return services[-1]

    yield serve
    for service in services:
        service.close()


def worker(service, rule=RULE, rank=0, **options):
    return Worker(VALUES, rule, service.open(), rank, synchronous=False, **options)


def asked_of(service):
    """The methods of the shards that are called from now on."""
    asked = []
    for peer in service.shards:
        peer.disturb = asked.append
    return asked


def center_of(service):
    return np.concatenate([p.target.read().data.view(np.float32) for p in service.shards])


def noise(*seed):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


@pytest.mark.parametrize("use_locking", [True, False])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_the_same_comes_out_as_by_messages(serve, use_locking, rho, monkeypatch):
    rule = ElasticAverage(workers=WORKERS, period=1, rho=rho)
    buffers = {"mean": np.zeros(SIZE // 4, np.float32)}
    found = []
    for possible in (True, False):
        monkeypatch.setattr(stream, "POSSIBLE", possible)
        service = serve(rule, {"w": noise(9)}, buffers, use_locking=use_locking)
        workers = [worker(service, rule, rank, buffers=buffers) for rank in range(WORKERS)]
        asked = asked_of(service)
        for number in range(2):
            for one in workers:
                one.parameters["w"] += noise(number, one.rank)
                one.buffers["mean"] += one.rank
                one.exchange()
        assert ("stream" in asked, "exchange" in asked) == (possible, not possible)
        mine = [buffer for one in workers for buffer in (one.local.x, one.local.copy)]
        found.append([center_of(service), *(b.view(np.float32) for b in mine if b is not None)])
    assert len(found[0]) == 1 + WORKERS * (2 if rho else 1)
    for by_memory, by_message in zip(*found, strict=True):
        np.testing.assert_array_equal(by_memory, by_message)


def test_small_parts_are_sent_as_messages(serve):
    values = {"w": np.zeros(1000, np.float32)}
    service = serve(RULE, values)
    one = Worker(values, RULE, service.open(), 0, synchronous=False)
    asked = asked_of(service)
    one.exchange()
    assert set(asked) == {"exchange", "received"}


def test_whatever_is_lost_or_made_twice_is_applied_once(serve, together):
    """With α = ¼ and powers of two every sum is exact, and x + c is conserved."""
    service = serve()
    lock, count = threading.Lock(), {}

    def disturb(method, shard):
        if method != "stream":
            return None
        with lock:
            count[shard] = count.get(shard, 0) + 1
        what = ("lost", "twice", "lose", None)[count[shard] % 4]
        if what == "lost":
            raise PeerLostError("the call was lost")
        return what

    for k, peer in enumerate(service.shards):
        peer.disturb = lambda method, k=k: disturb(method, k)
    workers = [worker(service, rank=rank) for rank in range(WORKERS)]
    for one in workers:
        one.parameters["w"] += 2.0 ** (10 + one.rank)

    def train(one):
        for _ in range(4):
            one.step()

    together(*[lambda w=w: train(w) for w in workers])
    total = sum((one.parameters["w"] for one in workers), center_of(service))
    np.testing.assert_array_equal(total, sum(2.0 ** (10 + rank) for rank in range(WORKERS)))
    assert workers[0].center.version == 4 * WORKERS
    assert min(count.values()) > 4 * WORKERS, "nothing was lost"


def test_what_is_not_finite_is_refused_and_named(serve):
    service = serve()
    one, two = (worker(service, rank=rank) for rank in range(2))
    one.parameters["w"][:] = 4
    one.parameters["w"][SIZE // 3] = np.nan
    with pytest.raises(NonFiniteError, match="'w' of rank 0"):
        one.exchange()
    c = center_of(service)
    assert np.isfinite(c).all()
    np.testing.assert_array_equal(c[: SIZE // 6], 1)  # what came before it was exchanged
    np.testing.assert_array_equal(one.parameters["w"][: SIZE // 6], 3)
    assert one.center.version == 0
    two.exchange()
    one.take_center()
    one.exchange()
    assert one.center.version == 2
    assert np.isfinite(one.parameters["w"]).all()


def test_a_shard_on_another_machine_is_asked_once(serve, monkeypatch):
    service = serve()
    one = worker(service)
    asked = asked_of(service)
    monkeypatch.setattr("springline.center.served.near_shard.Guest", elsewhere)
    one.parameters["w"][:] = 4
    one.exchange()
    np.testing.assert_array_equal(center_of(service), 1)
    one.exchange()
    assert asked.count("stream") == len(service.shards)
    assert asked.count("exchange") == 2 * len(service.shards)


def test_an_exchange_that_is_broken_off_leaves_nothing_under_way(serve, monkeypatch):
    service = serve()
    one, two = (worker(service, rank=rank) for rank in range(2))
    one.parameters["w"][:] = 4
    adopt, pieces = Parts.adopt_piece, []

    def interrupt(*arguments):
        pieces.append(arguments)
        if len(pieces) == 5:
            raise KeyboardInterrupt
        return adopt(*arguments)

    monkeypatch.setattr(Parts, "adopt_piece", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.exchange()
    two.exchange()
    one.take_center()
    one.exchange()
    np.testing.assert_array_equal(one.parameters["w"], center_of(service))
    assert one.center.version == 2


class Dying(Guest):
    """A shard's side that dies instead of giving an answer: the first time that `when` says so."""

    when = None

    def say(self, answer):
        when, Dying.when = Dying.when, None
        if when and when(answer):
            raise PeerLostError("the shard has died")
        Dying.when = when
        super().say(answer)


@pytest.fixture
def dying(monkeypatch):
    monkeypatch.setattr("springline.center.served.near_shard.Guest", Dying)

    def dying(when):
        monkeypatch.setattr(Dying, "when", staticmethod(when))

    return dying


@pytest.mark.parametrize("moves", [False, True])
def test_an_answer_is_lost(serve, dying, moves, monkeypatch, caplog):
    """The worker goes on from the center there, and only there; also if the shard has moved."""
    service = serve(shards=1)
    one = worker(service)
    answers = []

    def fourth(answer):
        answers.append(answer)
        if len(answers) == 4 and moves:
            monkeypatch.setattr(Guest, "__init__", elsewhere)
        return len(answers) == 4

    dying(fourth)
    one.parameters["w"][:] = 4
    one.exchange()
    np.testing.assert_array_equal(center_of(service), 1)
    lost = slice(3 * SLOT // 4, 4 * SLOT // 4)
    np.testing.assert_array_equal(one.parameters["w"][lost], 1)
    one.parameters["w"][lost] = 3
    np.testing.assert_array_equal(one.parameters["w"], 3)
    assert caplog.text.count("going on from the center") == 1
    assert one.center.version == 1


def elsewhere(*_):
    raise FileNotFoundError("no such process")


@pytest.mark.parametrize("moves", [False, True])
def test_a_refusal_is_lost(serve, dying, moves, monkeypatch):
    service = serve(shards=1)
    one = worker(service)

    def refused(answer):
        if answer < 4 and moves:  # of four blocks
            monkeypatch.setattr(Guest, "__init__", elsewhere)
        return answer < 4

    dying(refused)
    one.parameters["w"][SIZE // 2] = np.inf
    with pytest.raises(NonFiniteError, match="'w' of rank 0"):
        one.exchange()
    assert one.center.version == 0
    np.testing.assert_array_equal(center_of(service), 0)


def test_what_was_answered_all_the_same_is_adopted(serve, monkeypatch):
    """The call is said to be lost while the shard, which was busy, goes on with it."""
    monkeypatch.setattr("springline.center.served.peer._PAUSE", 0.3)
    service = serve(shards=1)
    one = worker(service)
    shard = service.shards[0]
    asked, ask = [], shard.ask

    def lose(method, *arguments):
        pending = ask(method, *arguments)
        asked.append(method)
        if method != "stream" or asked.count("stream") > 1:
            return pending
        shard.target._turn.acquire()
        threading.Timer(0.2, shard.target._turn.release).start()
        return Lost(PeerLostError("the actor is unavailable"))

    monkeypatch.setattr(shard, "ask", lose)
    one.parameters["w"][:] = 4
    one.exchange()
    np.testing.assert_array_equal(center_of(service), 1)
    np.testing.assert_array_equal(one.parameters["w"], 3)
    assert asked.count("stream") == 2


@pytest.mark.parametrize("what", ["Ring", "POSSIBLE"])
def test_a_worker_that_has_no_more_files_sends_messages(serve, monkeypatch, what):
    service = serve()
    one = worker(service)
    monkeypatch.setattr(stream, what, elsewhere if what == "Ring" else False)
    asked = asked_of(service)
    one.parameters["w"][:] = 4
    one.exchange()
    assert "exchange" in asked
    assert "stream" not in asked
    np.testing.assert_array_equal(center_of(service), 1)
    np.testing.assert_array_equal(one.parameters["w"], 3)


def message(number=1, incarnation=1, rank=0):
    nothing = np.empty(0, np.uint8)
    sender = Sender(rank, incarnation, number, number, number, 0.0)
    return Message(sender, nothing, 0, np.ones(1, bool), np.ones(1))


LENDER = """
import os, pickle, sys, time
import numpy as np
from springline.center.served.near import Ring
ring = Ring()
for slot in ring.slots:
    slot.view(np.float32)[:] = 4
address = ring.open()
for _ in range(int(sys.argv[1])):
    ring.say()
sys.stdout.buffer.write(pickle.dumps(address))
sys.stdout.flush()
if len(sys.argv) > 2:
    os.fork()  # a child that has the pipes, too
time.sleep(600)
"""


@pytest.fixture
def lend():
    """Start workers that send some pieces and then do nothing."""
    started = []

    def lend(pieces, *options):
        command = [sys.executable, "-c", LENDER, str(pieces), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        with process.stdout:
            return process, pickle.load(process.stdout)

    yield lend
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("options", [(), ("fork",)])
def test_a_worker_is_killed_in_the_middle(serve, lend, background, options):
    service = serve(shards=1)
    shard = service.shards[0].target
    process, address = lend(2, *options)
    waits = background(lambda: shard.stream(message(), False, address))
    while shard._book.pieces(message().sender) < 2:
        assert not waits.done()
    shard.exchange(replaced(message(rank=1), SIZE))  # nobody waits for it
    process.kill()
    assert waits.result(20) is True
    c = shard.read().data.view(np.float32)
    np.testing.assert_array_equal(c[: 2 * SLOT // 4], 1 * 0.75)
    np.testing.assert_array_equal(c[2 * SLOT // 4 :], 0)
    rows, _ = shard.rows()
    assert (rows[0].exchanges, rows[1].exchanges) == (0, 1)


def replaced(message, size):
    return Message(message.sender, np.zeros(4 * size, np.uint8), 0, message.seen, message.rates)


def test_a_worker_that_has_stopped_makes_room_for_its_next_life(serve, lend, background):
    service = serve(shards=1)
    shard = service.shards[0].target
    process, address = lend(SLOTS)
    waits = background(lambda: shard.stream(message(), False, address))
    while shard._book.pieces(message().sender) < SLOTS:
        assert not waits.done()
    process.send_signal(signal.SIGSTOP)
    reply = background(lambda: shard.exchange(replaced(message(1, incarnation=2), SIZE))).result(20)
    assert not reply.forgotten
    with pytest.raises(TakenOverError, match="Rank 0 has been taken over"):
        waits.result(20)


def test_a_shard_goes_on_in_the_middle_of_an_exchange(serve, tmp_path, lend, background):
    """It is started again from a checkpoint that has some of the pieces: they are not merged twice.

    The worker sends all that it has had no answer to, through new memory or as a message.
    """
    service = serve(shards=1, storage=str(tmp_path / "store"))
    shard = service.shards[0].target
    process, address = lend(3)
    waits = background(lambda: shard.stream(message(), False, address))
    while shard._book.pieces(message().sender) < 3:
        assert not waits.done()
    shard.save()
    process.kill()
    waits.result(20)
    again, third = service.make[0](), service.make[0]()
    x = np.full(SIZE, 4, np.float32)
    again.exchange(Message(message().sender, x.view(np.uint8), 0, np.ones(1, bool), np.ones(1)))
    np.testing.assert_array_equal(again.read().data.view(np.float32), 1)
    service.shards[0].target = third
    one = worker(service)
    one.member._incarnation = 1  # of the worker that was killed
    one.parameters["w"][:] = 4
    one.exchange()
    np.testing.assert_array_equal(center_of(service), 1)


def test_an_earlier_life_does_not_come_in_between(serve, lend, background):
    service = serve(shards=1)
    shard = service.shards[0].target
    process, address = lend(3)
    second = message(incarnation=2)
    waits = background(lambda: shard.stream(second, False, address))
    while shard._book.pieces(second.sender) < 3:
        assert not waits.done()
    process.kill()
    waits.result(20)
    with pytest.raises(TakenOverError, match="Rank 0 has been taken over"):
        shard.exchange(replaced(message(5, incarnation=1), SIZE))
    assert shard._book.pieces(second.sender) == 3


def test_memory_of_somebody_else_is_refused():
    ring = Ring()
    address = ring.open()
    with Guest(address, borrow(address.memory, populate=True)) as guest:
        ring.slots[0][:] = 7
        np.testing.assert_array_equal(guest.slots[0], 7)
    other = Ring()
    memory = address.memory
    for wrong in (
        {"memory": replace(memory, machine="another")},
        {"memory": replace(memory, token="0" * 32)},
        {"memory": replace(memory, number=other.open().memory.number)},
        {"memory": replace(memory, size=memory.size + 1)},
        {"memory": replace(memory, process=2**22 + 1)},
        {"there": (address.there[0], address.there[1] + 1)},
        {"back": (address.back[0], address.back[1] + 1)},
    ):
        before = open_files()
        there = replace(address, **wrong)
        with pytest.raises(OSError, match=r"another|gone on|No such"):
            Guest(there, borrow(there.memory, populate=True))
        assert open_files() <= before  # what earlier tests have left may go at any time
    ring.close()
    other.close()


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("leaves", ["afterwards", "in the middle"])
def test_nothing_stays_open(serve, monkeypatch, leaves):
    service = serve()
    before = open_files()
    one = worker(service)
    for _ in range(3):
        one.exchange()

    def wait_for(count):
        deadline = time.monotonic() + 10  # the shard may still be about to let go
        while open_files() > count:
            assert time.monotonic() < deadline

    kept = len(service.shards)  # by a shard, until the rank has other memory: its mapping
    wait_for(before + 2 * len(service.shards) + kept)  # the memory, and its mapping
    if leaves == "in the middle":  # as a signal's handler does
        adopt = Parts.adopt_piece

        def leave(*arguments):
            one.member.leave()
            return adopt(*arguments)

        monkeypatch.setattr(Parts, "adopt_piece", leave)
        one.exchange()
    one.member.leave()
    wait_for(before + kept)
    again = worker(service)
    again.exchange()
    again.member.leave()
    wait_for(before + kept)
