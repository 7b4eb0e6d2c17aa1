"""AGN and model averaging through the memory of workers on the shard's machine."""

import time

import numpy as np
import pytest
import torch
from streamed import BUFFERS, RULES, SIZE, VALUES, WORKERS, asked_of, noise, open_files, restarts

from served import worker
from springline import AGN
from springline.center import Layout, NonFiniteError, lent
from springline.center.plan import Plan, arrays_of
from springline.center.served import near, stream
from springline.center.served.merger import Merger
from springline.center.served.messages import Message, Sender
from springline.torch.outer import TorchOuter

pytestmark = pytest.mark.usefixtures("small")


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
