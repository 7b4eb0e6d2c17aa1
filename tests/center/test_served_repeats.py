"""Calls that are repeated, lost on the way there or on the way back: applied exactly once."""

import random
import threading
import time

import numpy as np
import pytest

from served import Service
from springline import AGN, ElasticAverage, ModelAverage, Worker
from springline.center import CenterError, CheckpointError, Layout
from springline.center.served.checkpoints import Checkpoints
from springline.center.served.messages import Message, Row, Sender
from springline.center.served.peer import Call, PeerLostError
from springline.center.served.replies import KEPT
from springline.center.served.seats import Seat
from springline.rules import SGD, Adam

WORKERS, EXCHANGES = 3, 20
SIZE = 200_000  # several shards
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(5, np.float32)}


@pytest.fixture
def serve():
    services = []

    def serve(rule, values=VALUES, **options):
        options = {"use_locking": True, "restore": None} | options
        services.append(Service(Layout.of(values), rule, values, **options))
        return services[-1]

    yield serve
    for service in services:
        service.close()


def worker(service, rule, rank, values=VALUES):
    return Worker(values, rule, service.open(), rank, synchronous=False, timeout=30)


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


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("springline.center.served.peer._PAUSE", 0.001)
    monkeypatch.setattr("springline.center.served.stream._LOOK", 0.05)


@pytest.fixture(params=["by message", "through memory"])
def way(request, monkeypatch):
    if request.param == "through memory":
        monkeypatch.setattr("springline.center.served.near.SMALL", 0)


def test_sums_of_integers_stay_exact(serve, together, way):
    """AGN with SGD at rate 1 adds whole numbers: one applied twice or not at all would show."""
    rule = AGN(workers=WORKERS, period=1, optimizer=SGD(1.0))
    service = serve(rule)
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
    service = serve(rule, values)
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
    service = serve(rule)
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


def message(rank, number, value, incarnation=1, size=5):
    sender = Sender(rank, incarnation, number, number, number, 0.0)
    data = np.full(size, value, np.float32).view(np.uint8)
    return Message(sender, data, 1, np.ones(1, bool), np.ones(1))


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


def test_a_shard_that_is_started_again_goes_on_from_its_checkpoint(serve, tmp_path):
    """What was applied after it is lost; what workers repeat is applied again, once."""
    rule = AGN(workers=2, period=1, optimizer=Adam(0.1))
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
    rule = AGN(workers=2, period=2, optimizer=SGD(1.0))
    service = serve(rule, storage=str(tmp_path / "store"))
    workers = [worker(service, rule, rank) for rank in range(2)]
    for one in workers:
        for _ in range(4):
            one.observe(dict.fromkeys(VALUES, np.float32(1)))
            one.step()
    workers[1].member.leave()
    service.head.target = service.new_head()
    center = service.open()
    assert center.version == 4
    assert [rank.steps for rank in center.progress()] == [4, 4]
    assert worker(service, rule, 1).start_step == 4
    assert workers[0].step() is False
    assert center.version == 4


@pytest.mark.parametrize(("what", "mean"), [("another head", 2.0), ("taken for dead", 3.0)])
def test_the_head_forgets_who_waits_in_a_round(serve, background, tmp_path, what, mean):
    """It asks again, or counts it as dead; nobody waits for ever, and the next round is whole."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    one, two = (worker(service, rule, rank) for rank in range(2))

    def round_(disturb, expected):
        for each, value in ((one, 1.0), (two, 3.0)):
            each.parameters["w"][:] = value
        waiting = background(one.exchange)
        while 0 not in Call(service.head, "waiting").result():
            assert not waiting.done()
        disturb()
        two.exchange()
        waiting.result(20)
        assert one.parameters["w"][0] == two.parameters["w"][0] == expected

    def forget():
        if what == "another head":
            service.head.target = service.new_head()
        else:
            service.head.target._seats.of[0].heard -= 1000

    round_(forget, mean)
    round_(lambda: None, 2.0)
    assert one.center.version == 2


def test_a_head_that_has_forgotten_the_center_says_so(serve):
    rule = AGN(workers=2, period=1, optimizer=SGD(1.0))
    service = serve(rule)
    one = worker(service, rule, 0)
    one.observe(dict.fromkeys(VALUES, np.float32(1)))
    one.exchange()
    service.head.target = service.new_head()  # without a storage
    with pytest.raises(CenterError, match="has nothing written down to go on from"):
        worker(service, rule, 1)
    zeros = np.zeros(len(service.shards[0].target._center), np.uint8)
    with pytest.raises(CenterError, match="has been trained, but its head was started again"):
        service.shards[0].target.initialise(zeros, zeros[:0])
    np.testing.assert_array_equal(service.shards[0].target.read().data.view(np.float32)[:5], -1)


def test_only_one_publishes(serve, monkeypatch):
    service = serve(ElasticAverage())
    service.head.target = service.new_head()
    monkeypatch.setattr("springline.center.served.founding._LEASE", -1.0)
    for who in ("slow", "quick"):
        assert Call(service.head, "claim", who).result() is None
    assert Call(service.head, "publish", "slow", service.description).result() is False
    assert Call(service.head, "publish", "quick", service.description).result() is True
    assert Call(service.head, "claim", "slow").result() == service.description


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


def unreadable(monkeypatch):
    """Let every storage be out of reach; return what ends it."""
    context = monkeypatch.context()
    patch = context.__enter__()

    def fail(self, path):
        raise CheckpointError(f"Cannot read {path}: stale file handle.")

    patch.setattr("springline.center.served.storage.Storage._read_slot", fail)
    return lambda: context.__exit__(None, None, None)


def test_a_shard_that_could_not_be_read_is_not_written_over(serve, tmp_path, monkeypatch):
    """It is started again while the storage is away for a moment."""
    rule = AGN(workers=2, period=1, optimizer=SGD(1.0))
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
    service = serve(AGN(workers=2, optimizer=SGD(1.0)), storage=str(tmp_path / "store"))
    end = unreadable(monkeypatch)
    service.head.target = service.new_head()
    with pytest.raises(CheckpointError, match="stale file handle"):
        Call(service.head, "claim", "another").result()
    end()
    found = Call(service.head, "claim", "another").result()
    assert found == service.description | {"storage": str(tmp_path / "store")}


def test_a_checkpoint_that_fails_is_told_and_not_tried_at_every_exchange(tmp_path, monkeypatch):
    tried = threading.Event()

    def collect():
        tried.set()
        raise OSError("no space left")

    checkpoints = Checkpoints("shard-0", str(tmp_path), (1, 30.0), collect)
    checkpoints.open()
    checkpoints.count()
    assert tried.wait(10)
    while checkpoints.failed is None:
        assert checkpoints._since
    assert checkpoints.failed == "OSError: no space left"
    tried.clear()
    checkpoints.count()
    assert not tried.wait(0.5)


def test_a_repeat_of_what_was_refused_is_refused(serve):
    """AGN's reply is the center; that the exchange was refused must not be lost with it."""
    values = {"b": np.full(5, 3e38, np.float32)}
    shard = serve(AGN(workers=2, period=1, optimizer=SGD(1.0)), values).shards[0].target
    refused = shard.exchange(message(0, 1, -3e38))
    assert refused.refused == 0
    assert shard.exchange(message(0, 1, -3e38)).refused == 0


def test_a_round_that_nobody_may_close_yet_is_waited_for(serve, tmp_path):
    """A head that was just started again closes no round, though nobody is missing."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    for rank in range(2):
        worker(service, rule, rank)
    seats = service.head.target._seats
    seats.quiet_until = time.monotonic() + 60
    lives = [seats.of[rank].incarnation for rank in range(2)]
    assert Call(service.head, "contribute", 1, lives[1], 1, 0.0).result() == (False, [0])
    Call(service.head, "withdraw", 0, lives[0], 1).result()
    assert Call(service.head, "begin", 0, lives[0], 0.1).result() == [1]


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
    while 0 not in Call(service.head, "waiting").result():
        assert not waiting.done()
    other.exchange()
    gone_on.set()
    waiting.result(20)
    for each in (one, other):
        np.testing.assert_array_equal(each.parameters["w"], 0.5)
    assert service.head.target._seats.closed == 1


@pytest.mark.parametrize("missed", [2, 15])
def test_who_was_away_for_many_rounds_is_in_the_next(serve, together, background, missed):
    """Taken for dead; it may not even be known any more who was in the one it would be in."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule)
    one, two = (worker(service, rule, rank) for rank in range(2))
    together(one.exchange, two.exchange)
    seats = service.head.target._seats
    plain = seats.is_alive
    seats.is_alive = lambda seat: seat is not seats.of[0] and plain(seat)
    for _ in range(missed):
        two.exchange()
    seats.is_alive = plain
    one.parameters["w"][:], two.parameters["w"][:] = 1, 3
    together(one.exchange, two.exchange)
    np.testing.assert_array_equal(one.center.values()["w"], 2)
    np.testing.assert_array_equal(one.parameters["w"], 2)
    assert seats.closed == missed + 2


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
    while Call(service.head, "waiting").result() != [0, 1]:
        assert not any(one.done() for one in waiting)
    workers[2].exchange()
    for one in waiting:
        one.result(20)
    for one in workers:
        np.testing.assert_array_equal(one.parameters["w"], 2)
    assert service.head.target._seats.closed == 5


def test_who_comes_back_to_a_new_head_finds_the_others(serve, tmp_path):
    """It asks the shards first, which may take long; only then do the quiet seconds begin."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule, storage=str(tmp_path / "store"))
    one, _ = (worker(service, rule, rank) for rank in range(2))
    head = service.new_head()
    assert head._seats.quiet_until < time.monotonic()
    service.head.target = head
    Call(service.head, "join", 0, one.member._incarnation).result()
    assert head._seats.quiet_until > time.monotonic()


def test_what_a_dead_worker_had_sent_may_still_arrive(serve, background, monkeypatch):
    """Its seat is free when it has been silent for long enough, and not in use."""
    service = serve(ElasticAverage(workers=2))
    head = service.head.target
    head._seats.of[1] = Seat(7, time.monotonic(), 0)
    monkeypatch.setattr(head._seats, "_grace", 1.5)
    joins = background(lambda: Call(service.head, "join", 1, None).result())
    time.sleep(0.3)  # it waits
    for _ in range(5):  # all at once, when the link is up again
        Call(service.head, "beat", 1, 7, Row(7)).result()
    life, _, _ = joins.result(20)
    assert life > 7
