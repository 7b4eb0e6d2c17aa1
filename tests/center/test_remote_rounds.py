"""Rounds at a remote center: what is called, and shards that restart in the middle."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from remote import contributing, message, worker
from springline import ModelAverage
from springline.center import CenterError
from springline.center.remote.messages import ClosedRound
from springline.center.remote.peer import Call, PeerLostError
from springline.center.remote.steps import Steps
from springline.errors import NonFiniteError, TakenOverError

WORKERS = 3
VALUES = {"w": np.zeros(200_000, np.float32), "b": np.zeros(5, np.float32)}
RULE = ModelAverage(workers=WORKERS, period=1)


def all_workers(service):
    return [worker(service, rank=rank) for rank in range(WORKERS)]


def meet(workers, together, number):
    """A round whose mean, `2 + number`, is not what any worker has: none looks like a copy."""
    for one in workers:
        one.parameters["w"][:] = (0, 1, 5)[one.rank] + number
    together(*[one.exchange for one in workers])
    for one in workers:
        np.testing.assert_array_equal(one.parameters["w"], 2 + number)


def test_a_round_asks_the_head_once_and_each_shard_twice(serve, together):
    service = serve()
    workers = all_workers(service)
    meet(workers, together, 0)
    of_head, of_shards = [], []
    service.head.disturb = lambda method: of_head.append(method) if method != "heartbeat" else None
    for peer in service.shards:
        peer.disturb = of_shards.append
    for number in range(3):
        meet(workers, together, number)
    assert of_head == ["contribute"] * 3 * WORKERS
    for method in ("contribute", "reduce"):
        assert of_shards.count(method) == 3 * WORKERS * len(service.shards)
    assert len(of_shards) == 2 * 3 * WORKERS * len(service.shards)


def test_a_shard_is_started_again_between_contribution_and_mean(serve, tmp_path, together):
    """What it had been sent is gone; all send it again."""
    service = serve(storage=str(tmp_path / "store"))
    workers, lock, calls = all_workers(service), threading.Lock(), []

    def restart(method):
        with lock:
            calls.append(method)
            if calls.count("reduce") == 1 and method == "reduce":
                service.shards[0].target = service.make[0]()

    service.shards[0].disturb = restart
    meet(workers, together, 0)
    meet(workers, together, 1)
    assert calls.count("contribute") >= 3 * WORKERS


def test_a_shard_is_started_again_while_it_makes_the_mean(serve, tmp_path, together, monkeypatch):
    service = serve(storage=str(tmp_path / "store"))
    workers, old, plain = all_workers(service), service.shards[0].target, Steps.round
    meet(workers, together, 0)

    def die(steps, messages, number):
        if steps in old._steps:
            service.shards[0].target = service.make[0]()
            raise PeerLostError("the shard has died")
        return plain(steps, messages, number)

    monkeypatch.setattr(Steps, "round", die)
    meet(workers, together, 1)
    assert service.shards[0].target is not old


def test_a_shard_is_started_again_between_two_rounds(serve, tmp_path, together):
    service = serve(storage=str(tmp_path / "store"))
    workers = all_workers(service)
    meet(workers, together, 0)
    service.shards[0].target.save()
    service.shards[0].target = service.make[0]()
    for number in range(1, 4):
        meet(workers, together, number)
    assert workers[0].center.version == 4


def test_an_earlier_incarnation_contributes_nothing(serve):
    values = {"b": np.zeros(5, np.float32)}
    shard = serve(values=values).shards[0].target
    shard.contribute(message(0, 1, 3.0, incarnation=2), 1)
    with pytest.raises(TakenOverError, match="Rank 0 has been taken over"):
        shard.contribute(message(0, 9, 5.0, incarnation=1), 1)
    mean = shard.reduce(ClosedRound(1, [0]), message(0, 1, incarnation=2).sender)
    np.testing.assert_array_equal(mean.data.view(np.float32), 3)


def test_who_leaves_does_not_wait_for_a_head_that_is_away(serve, background):
    """As after Ctrl-C, while a round is under way in the background."""
    service = serve()
    one = worker(service, timeout=None)
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


def test_a_late_repeat_does_not_replace_a_newer_message(serve):
    values = {"b": np.zeros(5, np.float32)}
    rule = ModelAverage(workers=1, period=1)
    shard = serve(rule, values).shards[0].target
    shard.contribute(message(0, 2, 7.0), 1)
    shard.contribute(message(0, 1, 5.0), 1)
    mean = shard.reduce(ClosedRound(1, [0]), message(0, 2, 7.0).sender)
    np.testing.assert_array_equal(mean.data.view(np.float32), 7)
    again = shard.reduce(ClosedRound(1, []), message(0, 2, 7.0).sender)
    assert again is mean  # one copy for all who ask


def test_a_round_whose_contributors_are_not_known_takes_who_is_here(serve):
    values = {"b": np.zeros(5, np.float32)}
    shard = serve(ModelAverage(workers=2, period=1), values).shards[0].target
    shard.contribute(message(1, 1, 5.0), 1)
    assert shard.reduce(ClosedRound(1, [0, 1]), message(1, 1, 5.0).sender) == [0]
    mean = shard.reduce(ClosedRound(1, []), message(1, 1, 5.0).sender)
    np.testing.assert_array_equal(mean.data.view(np.float32), 5)
    assert shard.reduce(ClosedRound(2, []), message(1, 2, 5.0).sender) == [
        1
    ]  # who is in it for certain


def test_who_asks_for_a_mean_late_gets_that_fragment(serve):
    """It was silent for long, and the others have made the next round, of another fragment."""
    rule = ModelAverage(workers=2, period=2, fragments=2)
    values = {name: np.zeros(5, np.float32) for name in "ab"}
    shard = serve(rule, values, shards=1).shards[0].target
    for rank in range(2):
        shard.contribute(message(rank, 1, 1.0), 1)
    shard.reduce(ClosedRound(1, [0, 1]), message(0, 1).sender)
    shard.contribute(replace(message(0, 2, 7.0), fragment=1), 2)
    shard.reduce(ClosedRound(2, [0]), message(0, 2).sender)
    late = shard.reduce(ClosedRound(1, [0, 1]), message(1, 1).sender)
    np.testing.assert_array_equal(late.data.view(np.float32), 1)


@pytest.mark.parametrize("back", [False, True])
def test_what_a_worker_has_reported_counts_if_it_dies(serve, background, back):
    """Its head hears of the death before the round is closed; its rank may be back by then."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule)
    one, two = (worker(service, rule, rank) for rank in range(2))
    for each in (one, two):
        each.parameters["w"][:] = each.rank
    two.local_step = 4
    background(two.exchange)
    while 1 not in contributing(service):
        threading.Event().wait(0.001)
    two.member._gone.set()  # it sends no more heartbeats
    Call(service.head, "leave", 1, None).result()  # as the launcher does for a dead worker
    assert one.center.progress()[1].steps == 0  # it is not in the center yet
    again = worker(service, rule, 1) if back else None
    if again:
        assert again.start_step == 0
        again.member.leave()  # which takes nothing of its predecessor's away
    one.exchange()
    np.testing.assert_array_equal(one.center.values()["w"], 0.5)
    assert one.center.progress()[1].steps == 4
    assert worker(service, rule, 1).start_step == 4


def test_a_round_of_the_dead_alone_is_opened_again(serve, background):
    """Nobody would reduce it: what was sent is dropped, and its steps do not count."""
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule)
    one, two = (worker(service, rule, rank) for rank in range(2))
    two.parameters["w"][:], two.local_step = 6, 4
    background(two.exchange)
    while 1 not in contributing(service):
        threading.Event().wait(0.001)
    two.member._gone.set()
    Call(service.head, "leave", 1, None).result()
    one.parameters["w"][:] = np.nan
    with pytest.raises(NonFiniteError):
        one.exchange()
    assert one.center.version == 0
    again = worker(service, rule, 1)
    assert again.start_step == 0
    one.parameters["w"][:], again.parameters["w"][:] = 1, 3
    waiting = background(one.exchange)
    again.exchange()
    waiting.result(20)
    np.testing.assert_array_equal(one.center.values()["w"], 2)


def test_who_leaves_in_the_middle_of_a_round_withdraws(serve, background):
    rule = ModelAverage(workers=2, period=1)
    service = serve(rule)
    one, two = (worker(service, rule, rank) for rank in range(2))
    for each in (one, two):
        each.parameters["w"][:] = each.rank
    waiting = background(two.exchange)
    while 1 not in contributing(service):
        threading.Event().wait(0.001)
    two.member.leave()
    with pytest.raises(CenterError, match="has left the center"):
        waiting.result(20)
    one.exchange()
    np.testing.assert_array_equal(one.center.values()["w"], 0)
