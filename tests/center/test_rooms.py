"""Rounds through the memory of a shard on the workers' machine."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from streamed import RULES, SIZE, VALUES, WORKERS, asked_of, elsewhere, open_files

from served import message, worker
from springline import ModelAverage
from springline.center import CenterError, NonFiniteError
from springline.center.served import rooms
from springline.center.served.parts import Parts
from springline.center.served.peer import PeerLostError
from springline.center.served.rooms import split

pytestmark = pytest.mark.usefixtures("small")


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


def test_nobody_adopts_pieces_of_two_rounds(serve, monkeypatch, together):
    """A round that begins while we adopt the last one: we take the whole of it, as a message."""
    rule = ModelAverage(workers=3, period=1)
    service = serve(rule, {"w": VALUES["w"]}, shards=1)
    shard = service.shards[0].target
    one, other = (worker(service, rule, rank, {"w": VALUES["w"]}) for rank in range(2))
    plain, adopted = Parts.adopt_mean, []
    mean, answered = shard.mean, threading.Barrier(3, timeout=30)

    def answer(*arguments):
        token = mean(*arguments)
        answered.wait()
        return token

    def adopt(parts, *arguments):
        plain(parts, *arguments)
        if parts.local is one.local:
            adopted.append(arguments)
        if parts.local is one.local and len(adopted) == 1:
            answered.wait()  # both are told that it is the first round
            shard.contribute(message(2, 2, 7.0, size=SIZE), 2)
            shard.reduce(2, [2], message(2, 2).sender)

    monkeypatch.setattr(Parts, "adopt_mean", adopt)
    monkeypatch.setattr(shard, "mean", answer)
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
            shard.contribute(message(1, 3, 7.0, size=SIZE), 3)
            shard.reduce(3, [1], message(1, 3).sender)

    service.shards[0].disturb = go_on
    one.exchange()
    np.testing.assert_array_equal(one.parameters["w"], 7)


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


def test_who_leaves_does_not_wait_for_a_head_that_is_away(serve, background):
    """As after Ctrl-C, while a round is under way in the background."""
    rule = RULES["average"]
    service = serve(rule)
    one = worker(service, rule, timeout=None)
    away = threading.Event()

    def be_away(method):
        if method in ("begin", "contribute"):
            away.set()
            raise PeerLostError("its machine is down")

    service.head.disturb = be_away
    exchange = background(one.exchange)
    assert away.wait(10)
    background(one.member.leave).result(10)
    with pytest.raises(CenterError, match="Rank 0 has left the center"):
        exchange.result(10)
