"""Heads and shards that restart, forget, or cannot read what they had written."""

import threading
import time

import numpy as np
import pytest

from remote import TOKEN, contributing, message, worker
from springline import AGN, AsyncDiLoCo, ElasticAverage, ModelAverage
from springline.center import CenterError, CheckpointError
from springline.center.remote.checkpoints import Checkpoints
from springline.center.remote.head import Head
from springline.center.remote.membership import MemberState
from springline.center.remote.messages import RankProgress
from springline.center.remote.peer import Call
from springline.center.remote.storage import Storage
from springline.center.token import issue
from springline.rules import SGD, Adam

SIZE = 200_000  # several shards
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(5, np.float32)}


def test_a_shard_that_is_started_again_goes_on_from_its_checkpoint(serve, tmp_path):
    """What was applied after it is lost; what workers repeat is applied again, once."""
    rule = AGN(workers=2, period=1, outer=Adam(0.1))
    values = {"b": np.zeros(5, np.float32)}
    service = serve(rule, values, storage=str(tmp_path / "store"))
    shard = service.shards[0].target
    shard.exchange(message(0, 1, 1.0))
    shard.save()
    saved = [array.copy() for array in shard.read_all()]
    after = shard.exchange(message(0, 2, 2.0))
    shard.exchange(message(1, 1, 3.0))

    again = service.make[0]()
    for ours, theirs in zip(again.read_all(), saved, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(again.exchange(message(0, 1, 1.0)).data, saved[0])  # a repeat
    np.testing.assert_array_equal(again.exchange(message(0, 2, 2.0)).data, after.data)


def test_a_head_that_is_started_again_knows_how_far_everybody_had_come(serve, tmp_path):
    rule = AGN(workers=2, period=2, outer=SGD(1.0))
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(2)]
    for one in workers:
        for _ in range(4):
            one.observe({name: np.ones_like(value) for name, value in VALUES.items()})
            one.step()
    workers[1].member.leave()
    service.head.target = service.new_head()
    center = service.open()
    assert center.version == 4
    assert [rank.steps for rank in center.progress()] == [4, 4]
    assert worker(service, rule, 1).start_step == 4
    assert workers[0].step() is False
    assert center.version == 4


@pytest.mark.parametrize(
    ("what", "mean"),
    [pytest.param("another head", 2.0, marks=pytest.mark.slow), ("taken for dead", 2.0)],
)
def test_the_head_forgets_who_waits_in_a_round(serve, background, tmp_path, what, mean):
    """It asks again, or counts it as dead, with what it has sent; and the next round is whole."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    one, two = (worker(service, rule, rank) for rank in range(2))

    def round_(disturb, expected):
        for each, value in ((one, 1.0), (two, 3.0)):
            each.parameters["w"][:] = value
        waiting = background(one.exchange)
        while 0 not in contributing(service):
            assert not waiting.done()
        disturb()
        two.exchange()
        waiting.result(20)
        assert one.parameters["w"][0] == two.parameters["w"][0] == expected

    def forget():
        if what == "another head":
            service.head.target = service.new_head()
        else:
            service.head.target._membership.members[0].heard -= 1000

    round_(forget, mean)
    round_(lambda: None, 2.0)
    assert one.center.version == 2


def test_a_head_that_has_forgotten_the_center_says_so(serve):
    rule = AGN(workers=2, period=1, outer=SGD(1.0))
    service = serve(rule)
    one = worker(service, rule, 0)
    one.observe({name: np.ones_like(value) for name, value in VALUES.items()})
    one.exchange()
    service.head.target = service.new_head()  # without a storage
    with pytest.raises(CenterError, match="has no record to go on from"):
        worker(service, rule, 1)
    zeros = np.zeros(len(service.shards[0].target._center), np.uint8)
    with pytest.raises(CenterError, match="has been trained, but its head restarted"):
        service.shards[0].target.initialise(zeros, zeros[:0])
    np.testing.assert_array_equal(service.shards[0].target.read().data.view(np.float32)[:5], -1)


def test_a_storage_belongs_to_one_center(serve, tmp_path):
    place = str(tmp_path / "store")
    service = serve(ElasticAverage(), storage=place)
    Storage(place).write("head", service.description | {"name": "one"})

    def find(name):
        service.head.target = Head(None, place, name=name)
        return service.head.target.registration.find()

    with pytest.raises(CenterError, match="belongs to the center 'one'; this one is 'other'"):
        find("other")
    assert find("one")["plan"] == service.description["plan"]


def unreadable(monkeypatch):
    """Let every storage be out of reach; return what ends it."""
    context = monkeypatch.context()
    patch = context.__enter__()

    def fail(self, path):
        raise CheckpointError(f"Cannot read {path}: stale file handle.")

    patch.setattr("springline.center.remote.storage.Storage._read_slot", fail)
    return lambda: context.__exit__(None, None, None)


def test_a_shard_that_could_not_be_read_is_not_written_over(serve, tmp_path, monkeypatch):
    """It restarts while the storage is away for a moment."""
    rule = AGN(workers=2, period=1, outer=SGD(1.0))
    values = {"b": np.zeros(5, np.float32)}
    service = serve(rule, values, storage=str(tmp_path / "store"))
    service.shards[0].target.exchange(message(0, 1, 1.0))
    service.shards[0].target.save()
    end = unreadable(monkeypatch)
    again = service.make[0]()
    again.save()  # as a head does that retires
    with pytest.raises(CheckpointError, match="stale file handle"):
        again.read()
    end()
    np.testing.assert_array_equal(again.read().data.view(np.float32), -1)


def test_a_head_reads_its_storage_again_if_it_could_not(serve, tmp_path, monkeypatch):
    service = serve(AGN(workers=2, outer=SGD(1.0)), storage=str(tmp_path / "store"))
    end = unreadable(monkeypatch)
    service.head.target = service.new_head()
    with pytest.raises(CheckpointError, match="stale file handle"):
        service.head.target.registration.find()
    end()
    found = service.head.target.registration.find()
    assert found == service.description | {"storage": str(tmp_path / "store")}


def test_a_checkpoint_that_fails_is_told_and_not_tried_at_every_exchange(tmp_path, monkeypatch):
    tried, room = threading.Event(), threading.Event()

    def collect():
        tried.set()
        if room.is_set():
            return {"round": 1}, {"w": np.zeros(3)}
        raise OSError("no space left")

    checkpoints = Checkpoints("shard-0", str(tmp_path), (1, 2.0), collect)
    checkpoints.open()
    checkpoints.count()
    assert tried.wait(10)
    while checkpoints.failed is None:
        assert checkpoints._since
    assert checkpoints.failed == "OSError: no space left"
    tried.clear()
    checkpoints.count()
    assert not tried.wait(0.5)
    room.set()
    until = time.monotonic() + 20
    while checkpoints._since:  # else its thread would warn in another test
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_round_that_nobody_may_close_yet_is_waited_for(serve, tmp_path):
    """A head that has just restarted closes no round, though nobody is missing."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    for rank in range(2):
        worker(service, rule, rank)
    membership = service.head.target._membership
    membership.quiet_until = time.monotonic() + 60
    incarnations = [membership.members[rank].incarnation for rank in range(2)]
    assert Call(service.head, "contribute", 1, incarnations[1], 1, 0.0, 1).result() == [0]
    Call(service.head, "withdraw", 0, incarnations[0], 1).result()
    assert Call(service.head, "begin", 0, incarnations[0], 0.1).result() == [1]


def test_a_head_that_was_started_again_does_not_know_who_was_in_a_round(
    serve, background, tmp_path
):
    """Whoever was takes its mean, and does not contribute the same to the next."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    one, other = (worker(service, rule, rank) for rank in range(2))
    for each in (one, other):
        each.parameters["w"][:] = each.rank
    calls, gone_on = [], threading.Event()

    def disturb(method):
        calls.append(method)
        if method == "contribute" and calls.count(method) == 1:
            return "lose"
        if method == "contribute" and calls.count(method) == 3:
            assert gone_on.wait(20)
            service.head.target = service.new_head()
        return None

    service.head.disturb = disturb
    waiting = background(one.exchange)
    while 0 not in contributing(service):
        assert not waiting.done()
    other.exchange()
    gone_on.set()
    waiting.result(20)
    for each in (one, other):
        np.testing.assert_array_equal(each.parameters["w"], 0.5)
    assert service.head.target._membership.closed == 1


@pytest.mark.parametrize("missed", [2, 15])
def test_who_was_away_for_many_rounds_is_in_the_next(serve, together, background, missed):
    """Taken for dead; it may not even be known any more who was in the one it would be in."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule)
    one, two = (worker(service, rule, rank) for rank in range(2))
    together(one.exchange, two.exchange)
    membership = service.head.target._membership
    plain = membership.is_alive
    membership.is_alive = lambda member: member is not membership.members[0] and plain(member)
    for _ in range(missed):
        two.exchange()
    membership.is_alive = plain
    one.parameters["w"][:], two.parameters["w"][:] = 1, 3
    together(one.exchange, two.exchange)
    np.testing.assert_array_equal(one.center.values()["w"], 2)
    np.testing.assert_array_equal(one.parameters["w"], 2)
    assert membership.closed == missed + 2


def test_a_head_and_the_shards_have_forgotten_rounds(serve, together, background, tmp_path):
    """They go on with the next after the last that workers know of, also with one who does not."""
    rule = ModelAverage(workers=3, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(3)]
    together(*[one.exchange for one in workers])
    for shard in service.shards:
        shard.target.save()
    for _ in range(3):
        together(*[one.exchange for one in workers])
    for shard, make in zip(service.shards, service.make, strict=True):
        shard.target = make()
    service.head.target = service.new_head()
    for one in workers:
        one.parameters["w"][:] = one.rank + 1
    workers[2].member._rounds._next = 0
    waiting = [background(one.exchange) for one in workers[:2]]
    while contributing(service) != [0, 1]:
        assert not any(one.done() for one in waiting)
    workers[2].exchange()
    for one in waiting:
        one.result(20)
    for one in workers:
        np.testing.assert_array_equal(one.parameters["w"], 2)
    assert service.head.target._membership.closed == 5


def test_who_comes_back_to_a_new_head_finds_the_others(serve, tmp_path):
    """It asks the shards first, which may take long; only then do the quiet seconds begin."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    one, _ = (worker(service, rule, rank) for rank in range(2))
    head = service.new_head()
    assert head._membership.quiet_until < time.monotonic()
    service.head.target = head
    Call(service.head, "join", 0, one.member._incarnation).result()
    assert head._membership.quiet_until > time.monotonic()


def test_what_a_dead_worker_had_sent_may_still_arrive(serve, background, monkeypatch):
    """Its rank is free when it has been silent for long enough, and not in use."""
    service = serve(ElasticAverage(workers=2))
    head = service.head.target
    dead = issue(TOKEN, "rank 1")
    head._membership.members[1] = MemberState(dead, time.monotonic(), 0)
    monkeypatch.setattr(head._membership, "_grace", 1.5)
    joins = background(lambda: Call(service.head, "join", 1, None).result())
    time.sleep(0.3)  # it waits
    for _ in range(5):  # all at once, when the link is up again
        Call(service.head, "heartbeat", 1, dead, RankProgress(dead)).result()
    incarnation, _ = joins.result(20)
    assert incarnation > dead


def test_exchanges_before_a_shards_restart_do_not_make_a_message_stale(serve, tmp_path):
    """A worker's last exchange may be among what was lost: it counts from the checkpoint on."""
    rule = AsyncDiLoCo(workers=2, period=1, outer=SGD(1.0), staleness="inverse")
    service = serve(rule, {"b": np.zeros(5, np.float32)}, storage=str(tmp_path / "store"))
    shard = service.shards[0].target
    for number in range(1, 5):
        for rank in range(2):
            shard.exchange(message(rank, number))
    shard.save()
    again = service.make[0]()
    again.exchange(message(0, 5, 1.0))
    np.testing.assert_array_equal(again.read().data.view(np.float32), -1)
    again.exchange(message(1, 5, 1.0))  # after one of another's
    np.testing.assert_array_equal(again.read().data.view(np.float32), -1.5)
