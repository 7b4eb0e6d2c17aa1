"""Exchanges with shards of the same machine: through memory, piece by piece."""

import threading

import numpy as np
import pytest
from streamed import asked_of, center_of

from served import Lost, worker
from springline import ElasticAverage, Worker
from springline.center import CenterError, NonFiniteError
from springline.center.served import stream
from springline.center.served.near import SLOT, Guest
from springline.center.served.parts import Parts
from springline.center.served.peer import PeerLostError

WORKERS = 3
SIZE = 9_000_000  # of each shard two rings full, and more
VALUES = {"w": np.zeros(SIZE, np.float32)}
RULE = ElasticAverage(workers=WORKERS, period=1, moving_rate=0.25)
OTHERS = [(True, 0.0), (False, 0.5)]


def noise(*seed):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


@pytest.mark.parametrize(
    ("use_locking", "rho"),
    [(True, 0.5), (False, 0.0), *(pytest.param(*v, marks=pytest.mark.slow) for v in OTHERS)],
)
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


def test_whatever_is_lost_or_made_twice_is_applied_once(serve, together, calls):
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
    assert min(count.values()) > 4, "nothing was lost"


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


@pytest.mark.parametrize("by_memory", [True, False])
def test_who_leaves_does_not_wait_for_a_shard_that_is_away(
    serve, background, monkeypatch, by_memory
):
    """As after Ctrl-C, while an exchange is under way in the background."""
    monkeypatch.setattr(stream, "POSSIBLE", by_memory)
    service = serve()
    one = worker(service, timeout=None)

    def be_away(method):
        if method in ("stream", "exchange"):
            away.set()
            raise PeerLostError("its machine is down")

    away = threading.Event()
    service.shards[0].disturb = be_away
    exchange = background(one.exchange)
    assert away.wait(10)
    background(one.member.leave).result(10)
    with pytest.raises(CenterError, match="Rank 0 has left the center"):
        exchange.result(10)
    assert service.head.target._seats.alive() == []
