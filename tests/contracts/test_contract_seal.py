"""Whose values a new center begins with, and who has finished."""

from functools import partial

import numpy as np
import pytest
from centers import KINDS, RULES, each, model, on, wait_for

from remote import Service
from springline import Worker
from springline.center import Layout
from springline.center.remote.peer import Call

FIRST = model(w=[[1, 2], [3, 4]], b=[5, 6])
OTHER = model(w=[[0, 1], [0, 1]], b=[0, 1])
LOADED = model(w=[[9, 8], [7, 6]], b=[5, 4])
REPLACED = "replace the weights that this worker has loaded"


def load(worker, values):
    for name, value in values.items():
        worker.parameters[name] = value


def has(arrays, values):
    for name, value in values.items():
        np.testing.assert_array_equal(arrays[name], value)


def begin_all(workers, together):
    """Let all begin, rank 0 first where they need not be there at once."""
    if not isinstance(workers[0].center, KINDS["collective"].center):
        return [worker.begin() for worker in workers]
    return together(*[worker.begin for worker in workers])


@each("elastic", "average", fixed=("elastic", "average"))
def test_what_the_first_has_loaded_is_the_start_of_all(place, name, together, caplog):
    workers = place.workers(FIRST, RULES[name](workers=2, period=1))
    load(workers[0], LOADED)
    assert begin_all(workers, together) == [True, False]
    for worker in workers:
        has(worker.parameters, LOADED)
        has(worker.center.values(), LOADED)
        assert worker.center.version == 0
    assert REPLACED not in caplog.text


@each("elastic", "average", fixed=("elastic", "average"))
def test_what_all_have_loaded_is_not_warned_of(place, name, together, caplog):
    workers = place.workers(FIRST, RULES[name](workers=2, period=1))
    for worker in workers:
        load(worker, LOADED)
    assert begin_all(workers, together)[0]
    for worker in workers:
        has(worker.parameters, LOADED)
    assert REPLACED not in caplog.text


@each("elastic", "average", fixed=("elastic", "average"))
def test_what_another_has_loaded_is_replaced_with_a_warning(place, name, together, caplog):
    workers = place.workers(FIRST, RULES[name](workers=2, period=1))
    load(workers[1], LOADED)
    assert begin_all(workers, together) == [True, False]
    for worker in workers:
        has(worker.parameters, FIRST)
        has(worker.center.values(), FIRST)
    assert caplog.text.count(REPLACED) == 1


@each("elastic", "average", "agn-sgd", fixed=("elastic", "average"))
def test_whoever_has_loaded_nothing_begins_where_it_is(place, name, together):
    workers = place.workers(FIRST, RULES[name](workers=2, period=1))
    assert begin_all(workers, together) == [True, True]


@on(fixed=True)
def test_a_worker_may_insist(place, together, caplog):
    """On what it has loaded; one that has loaded nothing takes the center."""
    workers = place.workers(FIRST, RULES["average"](workers=3), keep_own_weights=True)
    load(workers[0], OTHER)
    load(workers[1], LOADED)
    assert begin_all(workers, together) == [True, True, False]
    has(workers[1].parameters, LOADED)
    has(workers[2].parameters, OTHER)
    has(workers[1].center.values(), OTHER)
    assert REPLACED not in caplog.text


@on("asynchronous")
def test_a_restarted_worker_takes_the_center_whatever_it_reloads(place, caplog):
    rule = RULES["elastic"](workers=2, period=1, moving_rate=0.5)
    one, two = place.workers(FIRST, rule)
    for worker in (one, two):
        worker.begin()
        load(worker, LOADED)
        worker.step()
    two.member.leave()
    again = place.worker(FIRST, rule, 1)
    assert again.begin()  # it has loaded nothing
    again.member.leave()
    again = place.worker(FIRST, rule, 1)
    load(again, FIRST)
    assert not again.begin()
    has(again.parameters, again.center.values())
    assert caplog.text.count("After its restart, rank 1 goes on with the center's values") == 1
    assert REPLACED not in caplog.text


@on("asynchronous")
def test_values_that_are_not_finite_are_no_start(place):
    one, two = place.workers(FIRST, RULES["elastic"](workers=2))
    one.parameters["b"][1] = np.nan
    with pytest.raises(ArithmeticError, match="'b' has NaN"):
        one.begin()
    has(two.center.values(), FIRST)
    load(one, LOADED)  # mended
    assert one.begin()
    has(two.center.values(), LOADED)


@pytest.mark.parametrize("place", ["collective"], indirect=True)
def test_values_that_are_not_finite_are_no_start_of_any_rank(place, together):
    workers = place.workers(FIRST, RULES["average"](workers=2))
    workers[0].parameters["b"][1] = np.nan

    def begin(worker):
        with pytest.raises(ArithmeticError, match="'b' has NaN"):
            worker.begin()

    together(*[partial(begin, worker) for worker in workers])
    has(workers[1].center.values(), FIRST)


@pytest.mark.parametrize("place", ["remote"], indirect=True)
def test_a_head_that_was_restarted_has_forgotten_leases_and_who_has_finished(place, tmp_path):
    place.service = None
    rule = RULES["elastic"](workers=2)
    service = Service(Layout.of(FIRST), rule, FIRST, True, None, storage=str(tmp_path / "store"))
    one, two = (Worker(FIRST, rule, service.open(), rank, timeout=30) for rank in (0, 1))
    me = 0, one.member._incarnation
    assert Call(service.head, "seal", *me, 77, True, 0).result()[0] == "send"
    service.head.target = service.new_head()
    assert Call(service.head, "sealed").result() == 0
    assert two.begin()
    assert Call(service.head, "sealed").result() > 1
    two.finish()
    service.head.target = service.new_head()
    assert one.center.finished() == []
    two.member.confirm_finished()
    wait_for(lambda: one.center.finished() == [1])
    assert one.final(timeout=30)
    service.close()


@on("asynchronous")
def test_who_has_finished_is_known_until_it_comes_back(place):
    rule = RULES["elastic"](workers=2)
    one, two = place.workers(FIRST, rule)
    assert one.center.finished() == []
    two.member.leave()
    assert one.center.finished() == []
    place.worker(FIRST, rule, 1).finish()
    assert one.center.finished() == [1]
    assert one.final(timeout=30)
    again = place.worker(FIRST, rule, 1)
    assert again.center.finished() == [0]
    again.finish()


@pytest.mark.parametrize("place", ["local", "shared"], indirect=True)
def test_who_was_killed_while_it_sealed_leaves_nothing_behind(place):
    one, two = place.workers(FIRST, RULES["elastic"](workers=2))
    one.center.memory.center[:9] = 7  # what it had written by then
    assert two.begin()
    has(two.center.values(), FIRST)


@pytest.mark.parametrize("place", ["remote"], indirect=True)
def test_who_dies_while_it_sends_its_values_is_followed_by_another(place):
    one, two = place.workers(FIRST, RULES["elastic"](workers=2))
    load(one, LOADED)
    member, (shard, *_) = one.member, place.service.shards
    me = one.rank, member._incarnation
    kind, lease = Call(place.service.head, "seal", *me, 77, True, 0).result()
    assert kind == "send"
    assert shard.target.seal(lease, one.local.x[: len(shard.target._center)])
    member.leave()
    assert two.begin()
    has(two.center.values(), FIRST)
    assert not shard.target.seal(lease, one.local.x[: len(shard.target._center)])
    has(two.center.values(), FIRST)
