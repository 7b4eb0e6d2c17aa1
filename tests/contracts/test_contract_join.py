"""Create or join, what is refused and how it is said, ranks, members, leave."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from centers import KINDS, RULES, each, model, on
from torch.distributed import HashStore

from own_rules import Ahead
from springline import AGN, ElasticAverage, ModelAverage
from springline.center import CenterError, Layout, LayoutError, RankError, SettingsError
from springline.rules import SGD, Adam

FIRST = model(w=[[1, 2], [3, 4]], b=[5, 6])


@each()
def test_the_second_takes_the_values_of_the_first(place, name):
    rule = RULES[name](workers=2, period=1)
    first = place.worker(FIRST, rule, 0)
    pretrained = place.worker(model(w=[[9, 9], [9, 9]], b=[9, 9]), rule, 1)
    for worker in (first, pretrained):
        for key, value in FIRST.items():
            np.testing.assert_array_equal(worker.parameters[key], value)
            np.testing.assert_array_equal(worker.center.values()[key], value)
    assert first.center.version == pretrained.center.version == 0


@on(fixed=True)
def test_read_and_values_are_copies(place):
    rule = RULES["average" if not place.asynchronous else "elastic"]()
    center = place.make(Layout.of(FIRST), rule, FIRST)
    buffer = center.layout.allocate()
    assert center.read(buffer) is buffer
    np.testing.assert_array_equal(buffer, center.read())
    buffer[:] = 255
    center.values()["w"][:] = 7
    np.testing.assert_array_equal(center.values()["w"], FIRST["w"])


W, B = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("parameters", "buffers", "words"),
    [
        ({"w": W}, {}, "the center has parameter 'b', the worker does not"),
        ({"w": W, "b": B, "v": B}, {}, "the worker has parameter 'v', the center does not"),
        ({"w": W.T[:1], "b": B}, {}, r"'w' has shape \(2, 2\) in the center, \(1, 2\) in the w"),
        ({"w": W, "b": B.astype(float)}, {}, "'b' has dtype float32 in the center, float64 in"),
        ({"w": W}, {"b": B}, "'b' has kind parameter in the center, buffer in the worker"),
        ({"b": B, "w": W}, {}, "where the center has 'w', the worker has 'b'"),
    ],
    ids=["missing", "extra", "shape", "dtype", "kind", "order"],
)
@on("asynchronous")
def test_another_model_is_refused(place, parameters, buffers, words):
    rule = RULES["elastic"](workers=2)
    worker = place.worker(FIRST, rule, 0)
    with pytest.raises(LayoutError, match=words):
        place.worker(parameters, rule, 1, buffers=buffers)
    assert worker.center.members() == [0]
    np.testing.assert_array_equal(worker.center.values()["w"], FIRST["w"])


ADAM = AGN(workers=2, outer=Adam(0.1))
FIXED = AGN(workers=2, outer=SGD(0.1), fixed_rate=True)


class MyAdam(Adam):
    """Another class, though it has no kind of its own."""


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (ElasticAverage(workers=2), ModelAverage(workers=2), "rule='elastic'.*rule='average'"),
        (ADAM, AGN(workers=2, period=3, outer=Adam(0.1)), "period=10.*period=3"),
        (ADAM, AGN(workers=3, outer=Adam(0.1)), "workers=2.*workers=3"),
        (
            ElasticAverage(workers=2, moving_rate=0.3),
            ElasticAverage(workers=2),
            "moving_rate=0.3.*moving_rate=0.45",
        ),
        (ADAM, AGN(workers=2, outer=Adam(0.1, beta2=0.9)), "'beta2': 0.999.*'beta2': 0.9,"),
        (ADAM, AGN(workers=2, outer=SGD(0.1)), "outer=.*'adam'.*'sgd'"),
        (FIXED, replace(FIXED, outer=SGD(0.2)), "'learning_rate': 0.1.*'learning_rate': 0.2"),
        (ADAM, AGN(workers=2, outer=MyAdam(0.1)), "outer=.*'adam'.*'MyAdam'"),
    ],
    ids=["rule", "period", "workers", "moving_rate", "outer", "kind", "fixed rate", "subclass"],
)
@on("asynchronous")
def test_other_settings_are_refused(place, ours, theirs, words):
    worker = place.worker(FIRST, ours, 0)
    with pytest.raises(SettingsError, match=words):
        place.worker(FIRST, theirs, 1)
    assert worker.center.members() == [0]


ANOTHER = [(SGD(0.1), "'learning_rate': 0.1"), (Adam(0.5), "'adam'"), (Ahead(), "'ahead'")]


@pytest.mark.parametrize(("other", "words"), ANOTHER, ids=["rate", "kind", "own"])
@each("Pushes-sgd", "MeanOfPseudoGradients-sgd", fixed=("MeanOfPseudoGradients-sgd",))
def test_another_outer_optimizer_is_refused(place, name, other, words, together):
    """Its class and all its settings, with the learning rate, are the same on all workers."""
    ours = RULES[name](workers=2)
    theirs = replace(ours, outer=other)

    def refused(make, *arguments, **options):
        with pytest.raises(SettingsError, match=f"outer=.*{words}"):
            make(*arguments, **options)

    if place.joinable:
        place.worker(FIRST, ours, 0)
        refused(place.worker, FIRST, theirs, 1)
    else:  # both, since they start at once
        make, store = partial(refused, place.make, Layout.of(FIRST)), HashStore()
        ranks = enumerate((ours, theirs))
        together(*[partial(make, rule, FIRST, rank=k, store=store) for k, rule in ranks])


@on("asynchronous")
def test_the_learning_rate_and_rho_are_each_workers_own(place):
    place.worker(FIRST, ADAM, 0)
    place.worker(FIRST, AGN(workers=2, outer=Adam(0.7)), 1)
    elastic = place.other()
    elastic.worker(FIRST, ElasticAverage(workers=2), 0)
    elastic.worker(FIRST, ElasticAverage(workers=2, rho=0.5), 1)


@on("asynchronous", "by_path")
def test_another_lock_mode_is_refused(place):
    rule = RULES["elastic"](workers=2)
    place.worker(FIRST, rule, 0, use_locking=False)
    with pytest.raises(SettingsError, match=r"use_locking=False.*use_locking=True"):
        place.worker(FIRST, rule, 1, use_locking=True)


@on("asynchronous")
def test_settings_may_be_numpy_numbers(place):
    kwargs = {"period": np.int64(2), "workers": np.int32(2), "moving_rate": np.float32(0.5)}
    place.worker(FIRST, ElasticAverage(**kwargs), np.int64(0))
    place.worker(FIRST, ElasticAverage(period=2, workers=2, moving_rate=0.5), 1)


@pytest.mark.parametrize("rank", [-1, 2, True, 0.5, "0", None])
@on("asynchronous")
def test_a_rank_out_of_range_is_refused(place, rank):
    with pytest.raises(RankError, match=r"from 0 to 1.*2 workers.*Received: rank="):
        place.worker(FIRST, RULES["elastic"](workers=2), rank)


@each("elastic", "average")
def test_a_rank_is_used_once_and_free_again_after_leave(place, name):
    rule = RULES[name](workers=3)
    center = place.make(Layout.of(FIRST), rule, FIRST)
    assert center.members() == []
    one, two = place.worker(FIRST, rule, 1), place.worker(FIRST, rule, 2)
    assert center.members() == [1, 2]
    with pytest.raises(RankError, match=r"Rank 1 is in use by a live worker.*\[1, 2\]"):
        place.worker(FIRST, rule, 1)
    one.member.leave()
    one.member.leave()
    assert center.members() == [2]
    again = place.worker(FIRST, rule, 1)
    one.member.leave()  # it has no say in the rank any more
    assert center.members() == [1, 2]
    assert (again.rank, two.rank) == (1, 2)


@each(fixed=("elastic", "average"))
def test_nothing_is_exchanged_after_leave(place, name):
    worker = place.worker(FIRST, RULES[name]())
    worker.observe({key: np.ones_like(value) for key, value in FIRST.items()})
    worker.member.leave()
    with pytest.raises(CenterError, match="Rank 0 has left the center"):
        worker.exchange()
    assert worker.center.version == 0


@on("asynchronous")
def test_close_leaves_with_all_members(place):
    rule = RULES["elastic"](workers=2)
    workers = place.workers(FIRST, rule)
    for worker in workers:
        worker.center.close()
        worker.center.close()
    with pytest.raises(CenterError, match="has left"):
        workers[0].exchange()
    assert place.worker(FIRST, rule, 0).center.members() == [0]


@each(fixed=("elastic", "average"))
def test_the_version_counts_exchanges_or_rounds(place, name, together):
    workers = place.workers(FIRST, RULES[name](workers=2, period=1))

    def step(worker):
        worker.observe({key: np.ones_like(value) for key, value in FIRST.items()})
        assert worker.step()

    for done in (1, 2, 3):
        together(*[lambda w=w: step(w) for w in workers])
        expected = done if workers[0].in_rounds else 2 * done
        assert [w.center.version for w in workers] == [expected] * 2


def visit(pipe, kind, path, rule):
    center = KINDS[kind].open(path)
    seen = center.values(), center.version, center.members(), center.settings
    member = center.join(1, rule)
    pipe.send((seen, center.members()))
    pipe.recv()
    member.leave()
    center.close()
    pipe.send("left")


@on("asynchronous", "by_path")
def test_any_process_opens_it_by_path(place, start):
    rule = RULES["elastic"](workers=2, period=1)
    worker = place.worker(FIRST, rule, 0)
    worker.parameters["b"] += 4
    worker.step()
    kind = next(k for k, cls in KINDS.items() if isinstance(place, cls))
    _, pipe = start(visit, kind, place.path, rule)
    (values, version, members, settings), with_it = pipe.recv()
    np.testing.assert_array_equal(values["b"], FIRST["b"] + 1)
    assert (version, members, settings) == (1, [0], worker.center.settings)
    assert with_it == worker.center.members() == [0, 1]
    pipe.send("leave")
    assert pipe.recv() == "left"
    assert worker.center.members() == [0]
