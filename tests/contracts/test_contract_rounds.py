"""Synchronous rounds over the live members, and the barrier before the first step."""

import random

import pytest
from centers import PATIENCE, RULES, each, model, on, wait_for

from springline import ModelAverage
from springline.center import RoundTimeoutError

START = model(v=[0, 0])


def average(place, ranks, workers=3, **options):
    """Workers of these ranks, each with a value of its own: 1, 10, 100."""
    made = [place.worker(START, ModelAverage(workers=workers), r, **options) for r in ranks]
    for worker in made:
        worker.parameters["v"][:] = 10**worker.rank
    return made


def v(worker_or_center):
    values = getattr(worker_or_center, "parameters", None) or worker_or_center.values()
    assert values["v"][0] == values["v"][1]
    return float(values["v"][0])


@on("synchronous")
def test_the_mean_divides_by_the_contributions(place, together):
    workers = average(place, [0, 1])  # of three
    together(*[w.exchange for w in workers])
    assert [v(w) for w in workers] == [5.5, 5.5]
    assert v(workers[0].center) == 5.5


@on("synchronous")
def test_who_leaves_is_no_longer_waited_for(place, background):
    one, two, three = average(place, [0, 1, 2])
    rounds = [background(w.exchange) for w in (one, two)]
    wait_for(lambda: place.waits(0) and place.waits(1))
    assert not any(r.done() for r in rounds)
    three.member.leave()
    for r in rounds:
        r.result(PATIENCE)
    assert v(one) == v(two) == v(one.center) == 5.5
    two.member.leave()
    one.exchange()
    assert one.center.version == 2


@on("synchronous")
def test_who_joins_during_a_round_takes_part_in_the_next(place, background, together):
    one, two = average(place, [0, 1])
    first = background(one.exchange)
    wait_for(lambda: place.waits(0))
    (three,) = average(place, [2])
    early = background(three.exchange)  # it has to wait for the round that is under way
    assert not first.done()
    two.exchange()
    first.result(PATIENCE)
    assert v(one) == v(two) == 5.5
    together(one.exchange, two.exchange)
    early.result(PATIENCE)
    assert v(one) == v(two) == v(three) == (5.5 + 5.5 + 100) / 3
    assert one.center.version == 2


@on("synchronous")
def test_who_joins_an_untouched_round_is_part_of_it(place, background):
    one, two = average(place, [0, 1])
    (three,) = average(place, [2])
    rounds = [background(w.exchange) for w in (one, two)]
    wait_for(lambda: place.waits(0) and place.waits(1))
    three.exchange()
    for r in rounds:
        r.result(PATIENCE)
    assert v(one) == v(two) == v(three) == 37


@on("synchronous")
def test_a_timeout_names_the_missing_and_the_others_go_on(place, together):
    one, *late = average(place, [0, 1, 2], timeout=0.2)
    for waits_for in ("round 1", "the round that is under way"):
        with pytest.raises(
            RoundTimeoutError,
            match=rf"0.2 s for {waits_for}; missing: rank 1\b.*, rank 2\b.*\. Are",
        ):
            one.exchange()
    for worker in late:
        worker.member.timeout = 30
    together(*[w.exchange for w in late])  # without the one that gave up
    assert v(late[0]) == v(late[1]) == 55
    one.member.timeout = 30
    together(*[w.exchange for w in (one, *late)])
    assert v(one) == v(late[0]) == v(late[1]) == 37
    assert one.center.version == 2


@on("synchronous")
def test_comings_and_goings(place, together):
    """Workers that join and leave as they like: nobody waits for ever, the center stays inside."""
    workers = 3
    center = average(place, [0], workers)[0].center
    center.close()

    def life(rank):
        rng = random.Random(rank)
        for _ in range(12):
            worker = place.worker(START, ModelAverage(workers=workers), rank)
            for _ in range(rng.randrange(1, 6)):
                worker.parameters["v"][:] = rank + 1
                worker.exchange()
                assert 1 <= v(worker) <= workers
            worker.member.leave()
        return True

    assert together(*[lambda r=r: life(r) for r in range(workers)]) == [True] * workers


@each("elastic", "average")
def test_the_barrier_holds_until_all_have_joined_once(place, name, background):
    rule = RULES[name](workers=2)
    early = background(lambda: place.worker(START, rule, 0, synchronous=True))
    wait_for(lambda: place.opened and place.opened[0].members() == [0])
    assert not early.done()
    second = place.worker(START, rule, 1, synchronous=True)
    first = early.result(PATIENCE)
    for worker in (first, second):
        worker.member.leave()
    alone = place.worker(START, rule, 0, synchronous=True)  # a center that has started never waits
    assert alone.center.members() == [0]


@each("elastic", "average")
def test_the_barrier_times_out_naming_the_missing(place, name):
    rule = RULES[name](workers=3)
    with pytest.raises(
        RoundTimeoutError, match=r"all workers to start; missing: rank 0\b.*, rank 2\b.*\. Are"
    ):
        place.worker(START, rule, 1, synchronous=True, timeout=0.1)
    assert place.worker(START, rule, 1).center.members() == [1]  # the rank is free again
