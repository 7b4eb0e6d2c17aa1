"""DiLoCo and its relatives: settings that go together, schedules, fragments and paces."""

import numpy as np
import pytest

from own_rules import Pushes
from recorded import TORCHFT, adoptions, diloco_of, gradient, start
from springline import (
    AGN,
    AsyncDiLoCo,
    DiLoCo,
    ElasticAverage,
    LayoutError,
    ModelAverage,
    SettingsError,
    SlowMo,
    Worker,
    outer,
    worker_state,
)
from springline.rules.fragments import fragment_of
from springline.rules.optimizers import BlockMomentum, DelayedNesterov, Nesterov
from springline.rules.outer import Exchange, Point
from springline.rules.period import Gaps
from springline.rules.reference import Twin
from springline.schedule import QSR, Warmup


@pytest.mark.parametrize("name", TORCHFT)
def test_the_twin_does_what_torchft_did(name):
    rule, inner = diloco_of(name)
    twin, rows = Twin(rule, start(), inner, gradient), TORCHFT[name]["rows"]
    for k, (_, row) in enumerate(zip(twin.run([[0, 1]] * len(rows)), rows, strict=True)):
        for worker, recorded in zip(twin.workers, row, strict=False):
            for key, x in worker.x.items():
                np.testing.assert_allclose(x, recorded[key], rtol=0, atol=2e-5)
        if k in adoptions(name):
            for key, c in twin.c.items():
                np.testing.assert_allclose(c, row[2][key], rtol=0, atol=2e-5)


def test_pushes_of_delayed_nesterov_are_one_step_with_their_mean():
    """N pushes from the same center end where one Nesterov step with their mean does."""
    rng = np.random.default_rng(0)
    delayed, plain = DelayedNesterov(0.7, 0.9, every=3), Nesterov(0.7, 0.9)
    point = Point(np.ones(4), {k: np.zeros(s) for k, (s, _) in delayed.state("", (4,)).items()})
    right = Point(np.ones(4), {"momentum": np.zeros(4)})
    for _ in range(4):
        pushes = rng.standard_normal((3, 4))
        for g in pushes:
            then = Point(np.empty(4), {k: np.empty_like(v) for k, v in point.state.items()})
            delayed.step(point, g, Exchange(rate=0.7), then)
            point = then
        then = Point(np.empty(4), {"momentum": np.empty(4)})
        plain.step(right, pushes.mean(axis=0), Exchange(rate=0.7), then)
        right = then
        np.testing.assert_allclose(point.c, right.c)
        np.testing.assert_allclose(point.state["momentum"], right.state["momentum"])


def test_slow_momentum_without_the_workers_rate_is_slowmo_at_a_constant_one():
    found = []
    for rule in (SlowMo(period=1), DiLoCo(period=1, outer=outer.SlowMomentum())):
        worker = Worker({"w": np.zeros(2)}, rule)
        worker.set_learning_rate(0.125)
        for gone in (1.0, 3.0, -2.0):
            worker.parameters["w"] -= gone
            worker.step()
        found.append(worker.center.values()["w"].tolist())
    assert found[0] == found[1] == [-4.25, -4.25]  # m: 1, 3.5, -0.25; c: -1, -4.5, -4.25


def test_what_depends_on_the_number_of_workers_is_filled_in():
    assert AsyncDiLoCo(workers=4).outer == DelayedNesterov(0.7, 0.5, every=4)
    assert DiLoCo(workers=4, outer=BlockMomentum()).outer.momentum == 0.75
    assert DiLoCo(workers=4, outer=BlockMomentum(1.0, 0.9)).outer.momentum == 0.9
    for rule in (AGN, Pushes):
        assert rule(workers=4, outer=DelayedNesterov(0.1)).outer.every == 4


@pytest.mark.parametrize(
    ("period", "right"),
    [
        (10, (0.7, 0.5)),
        (20, (0.7, 0.5)),
        (50, (1.0, 0.5)),
        (500, (0.7, 0.9)),
        (Warmup(20, then=10), (0.7, 0.5)),
        (Warmup(20, then=QSR(500, 1.0, lambda step: 0.1, steps=2000)), (0.7, 0.9)),
        (lambda step: 10, (1.0, 0.5)),
    ],
)
def test_the_outer_momentum_fits_the_period(period, right):
    assert DiLoCo(period=period).outer == Nesterov(*right)


@pytest.mark.parametrize(
    ("period", "right"), [(20, (0.7, 0.5)), (21, (1.0, 0.0)), (500, (1.0, 0.0))]
)
def test_without_rounds_long_periods_have_no_momentum(period, right):
    assert AsyncDiLoCo(period=period, workers=2).outer == DelayedNesterov(*right, every=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"period": 10, "fragments": 3}, "multiple of the number of fragments, 3"),
        ({"period": 10, "fragments": 2, "delay": 5}, "below the steps between two exchanges, 5"),
        ({"period": Warmup(5, then=10), "delay": 1}, "needs a constant `period`"),
        ({"delay": -1}, "`delay` must be an integer >= 0"),
        ({"mixing": 1.0}, "0 <= mixing < 1"),
        ({"fragments": 0}, "`fragments` must be an integer >= 1"),
        ({"fragments": []}, "`fragments` must not be empty"),
        ({"period": Warmup(5, then=10), "fragments": []}, "`fragments` must not be empty"),
    ],
)
def test_what_does_not_go_together(settings, words):
    with pytest.raises((SettingsError, ValueError), match=words):
        DiLoCo(**settings)


def test_more_that_does_not_go_together():
    with pytest.raises(ValueError, match=r"None, .inverse. or .sqrt.\. .*'root'"):
        AsyncDiLoCo(staleness="root")
    with pytest.raises(SettingsError, match="needs a constant `period`"):
        AsyncDiLoCo(dynamic_steps=True, period=lambda step: 3)
    with pytest.raises(SettingsError, match="exclude each other"):
        Worker({"w": np.zeros(2)}, DiLoCo(delay=1), overlap=True)
    with pytest.raises(ValueError, match=r"finite number >= 0\. Received: -1 for exchange 0"):
        outer.SGD(lambda number: -1)


def test_schedules():
    assert [Gaps(Warmup(2, then=3)).before_round(r) for r in range(4)] == [1, 1, 3, 3]
    assert [Gaps(Warmup(2, then=4), 2).before_round(r) for r in range(4)] == [1, 1, 2, 2]
    growing = QSR(2, 0.2, lambda step: 0.1 if step < 10 else 0.1 / (step - 8), steps=30)
    assert [growing(step) for step in (0, 9, 10, 12, 28, 29)] == [4, 4, 16, 18, 2, 1]
    with pytest.raises(ValueError, match="A schedule returned it for step 7"):
        Gaps(lambda step: 0).at(7)


@pytest.mark.parametrize("rule", [ModelAverage, AsyncDiLoCo])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_schedule_is_not_asked_for_steps_that_are_never_made(rule, fragments):
    rates, periods = [0.1] * 5 + [0.05] * 5, [4, 1, 3, 2] + [2] * 6
    for period in (QSR(2, 0.2, rate=rates.__getitem__, steps=10), periods.__getitem__):
        worker = Worker(
            {"w": np.zeros(2), "v": np.zeros(2)}, rule(period=period, fragments=fragments)
        )
        for _ in range(10):
            exchanged = worker.step()
        assert exchanged
        worker.finish()


def test_beyond_its_steps_the_period_of_qsr_is_one():
    assert QSR(2, 0.2, rate=[0.1, 0.05].__getitem__, steps=2)(2) == 1
    again = QSR(2, 0.2, rate=[0.1, 0.2, 0.05, 0.05, 0.2, 0.05, 0.05, 0.05].__getitem__, steps=8)
    assert [again(step) for step in (0, 1, 2, 3, 4)] == [2, 2, 6, 5, 2]  # a rate that restarts


def test_a_schedule_is_compared_by_what_it_returns():
    one, other = (ModelAverage(period=Warmup(n, then=5)).settings()["period"] for n in (3, 4))
    assert one == "Warmup: 1×3 5×997"
    assert one != other
    late = (ModelAverage(period=lambda s, n=n: 1 + s % 7 if s < n else 3) for n in (99, 100))
    one, other = (rule.settings()["period"] for rule in late)
    assert one.startswith("schedule: 1×1 2×1 4×1 1×1 2×1 4×1 1×1 2×1 ... (")
    assert one != other


def test_fragments():
    sizes = {"a.w": 60, "a.b": 5, "b.w": 50, "b.b": 5, "c": 1}
    assert list(fragment_of(sizes, 2).values()) == [0, 1, 1, 1, 1]
    assert list(fragment_of(sizes, 5).values()) == [0, 1, 2, 3, 4]
    assert list(fragment_of(sizes, [["b", "c"], ["a"]]).values()) == [1, 1, 0, 0, 0]
    assert list(fragment_of({"l.1": 1, "l.10": 1}, [["l.1"], ["l.10"]]).values()) == [0, 1]


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        (6, "has 5 parameters and cannot be cut into 6"),
        ([["a"], ["b"]], "leaves out 'c'"),
        ([["a", "c"], ["b", "a.w"]], "'a.w' in two"),
        ([["a", "c", "d"], ["b"]], "names 'd'"),
        ([["a", "b", "c"], []], "empty"),
        (["a", "b"], r"write \['a'\]"),
        ([["a", "b", "c"], 5], r"lists of names\. Received: 5 in a list"),
    ],
)
def test_fragments_that_are_refused(fragments, words):
    with pytest.raises(LayoutError, match=words):
        fragment_of({"a.w": 60, "a.b": 5, "b.w": 50, "b.b": 5, "c": 1}, fragments)


def test_a_slower_worker_makes_fewer_steps(monkeypatch):
    rule = AsyncDiLoCo(period=8, dynamic_steps=True)
    worker = Worker({"w": np.zeros(2)}, rule)
    for speed, fastest, steps in ((0.0, 0.0, 8), (5.0, 10.0, 4), (10.0, 10.0, 8), (0.1, 10.0, 1)):
        monkeypatch.setattr(worker.member, "fastest", lambda fastest=fastest: fastest)
        worker.pace.speed = speed
        worker.plan_next()
        made = 1
        while not worker.advance():
            made += 1
        assert made == steps


def test_the_center_knows_the_fastest():
    worker = Worker({"w": np.zeros(2)}, AsyncDiLoCo(period=1))
    assert worker.member.fastest() == 0
    worker.step()
    worker.step()
    assert worker.member.fastest() == pytest.approx(worker.pace.speed, rel=1e-3)
    assert worker.pace.speed > 0


def test_a_worker_that_goes_back_is_not_of_negative_speed():
    worker = Worker({"w": np.zeros(3)}, AsyncDiLoCo(period=2))
    before = worker_state.save(worker)
    for _ in range(4):
        worker.step()
    worker_state.load(worker, before)
    for _ in range(2):
        worker.step()
    assert worker.local.speed > 0
    assert worker.pace.pause(worker.local_step - 1) == 0  # where a front end sets the step back


def test_how_far_a_worker_is_from_the_center():
    worker = Worker({"w": np.ones(4)}, ModelAverage(workers=2, period=1), synchronous=False)
    worker.parameters["w"] += 1
    worker.step()
    assert worker.distance == 0  # it was alone in the round
    pulled = Worker({"w": np.ones(4)}, ElasticAverage(period=1, moving_rate=0.5))
    pulled.parameters["w"] += 0.5
    pulled.step()
    assert pulled.distance == pytest.approx(0.5)
