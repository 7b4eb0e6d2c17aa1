"""Workers that lend memory to a shard: killed, stopped, gone; and what is left open."""

import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from streamed import center_of, open_files

from served import worker
from springline import ElasticAverage
from springline.center.errors import TakenOverError
from springline.center.lent import borrow
from springline.center.served.messages import Message, Sender
from springline.center.served.near import SLOT, SLOTS, Guest, Request, Ring
from springline.center.served.parts import Parts

WORKERS = 3
SIZE = 9_000_000  # of each shard two rings full, and more
VALUES = {"w": np.zeros(SIZE, np.float32)}
RULE = ElasticAverage(workers=WORKERS, period=1, moving_rate=0.25)


def message(number=1, incarnation=1, rank=0):
    nothing = np.empty(0, np.uint8)
    sender = Sender(rank, incarnation, number, number, number, 0.0)
    return Message(sender, nothing, 0, np.ones(1, bool), np.ones(1))


@pytest.mark.parametrize("options", [(), ("fork",)])
def test_a_worker_is_killed_in_the_middle(serve, lend, background, options):
    service = serve(shards=1)
    shard = service.shards[0].target
    process, address = lend(2, *options)
    waits = background(lambda: shard.stream(Request(message(), False, address).pack()))
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
    waits = background(lambda: shard.stream(Request(message(), False, address).pack()))
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
    waits = background(lambda: shard.stream(Request(message(), False, address).pack()))
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
    waits = background(lambda: shard.stream(Request(second, False, address).pack()))
    while shard._book.pieces(second.sender) < 3:
        assert not waits.done()
    process.kill()
    waits.result(20)
    with pytest.raises(TakenOverError, match="Rank 0 has been taken over"):
        shard.exchange(replaced(message(5, incarnation=1), SIZE))
    assert shard._book.pieces(second.sender) == 3


def test_memory_of_somebody_else_is_refused():
    ring, other = Ring(), Ring()
    ring.open()
    other.open()
    address = ring.address
    with Guest(address, borrow(address.memory, populate=True)) as guest:
        ring.slots[0][:] = 7
        np.testing.assert_array_equal(guest.slots[0], 7)
    memory, before = address.memory, open_files()
    for wrong in (
        {"memory": replace(memory, machine="another")},
        {"memory": replace(memory, token="0" * 32)},
        {"memory": replace(memory, number=other.address.memory.number)},
        {"memory": replace(memory, size=memory.size + 1)},
        {"memory": replace(memory, process=2**22 + 1)},
        {"there": (address.there[0], address.there[1] + 1)},
        {"back": (address.back[0], address.back[1] + 1)},
    ):
        there = replace(address, **wrong)
        with pytest.raises(OSError, match=r"another|gone on|No such"):
            Guest(there, borrow(there.memory, populate=True))
    assert open_files() <= before  # what earlier tests have left may go at any time
    ring.close()
    other.close()


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
            time.sleep(0.05)

    kept = len(service.shards)  # by a shard, until the rank has other memory: its mapping
    # The memory, its mapping, and two pipes with both their ends here and one at the shard.
    wait_for(before + (2 + 6) * len(service.shards) + kept)
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
