"""Rounds through the memory of a shard when something dies, comes late or is given up."""

import json
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest
from streamed import RULES, SIZE, VALUES, WORKERS, restarts

from served import message, worker
from springline import ModelAverage
from springline.center import RoundTimeoutError, lent
from springline.center.errors import TakenOverError
from springline.center.served import rooms
from springline.center.served.parts import Parts
from springline.center.served.peer import PeerLostError

pytestmark = pytest.mark.usefixtures("small")


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
    earlier, later = message(0, 1, 1.0, size=SIZE), message(0, 2, size=SIZE)
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
    offer = shard.lend(message(0, 1).sender, lent.machine())
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
    again = shard.lend(message(0, 2).sender, lent.machine())
    assert shard.mean(4, [0, 1], message(0, 2).sender) == [0, 1]
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
