"""What must hold for any numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from springline import LocalCenter, Worker
from springline.center import Layout, Local
from springline.rules import (
    AGN,
    SGD,
    Adagrad,
    Adam,
    ElasticAverage,
    ModelAverage,
    Momentum,
    Nesterov,
)
from springline.rules.outer import Exchange, Point
from springline.rules.reference import Optimizer, Twin
from springline.rules.rule import is_finite, reduce

N = 5
values = arrays(np.float64, N, elements=st.floats(-100, 100))
anything = arrays(np.float32, N, elements=st.floats(width=32))
rates = st.floats(0.01, 1.0)
OUTERS = [SGD(0.1), Momentum(0.1), Nesterov(0.1), Adagrad(0.1), Adam(0.1)]


def exchange_once(rule, x, c):
    layout = Layout.of({"v": x})
    center = LocalCenter(layout, rule, {"v": c})
    local = Local(layout, rule)
    layout.write(local.x, {"v": x})
    center.join(0, rule).exchange(local)
    return layout.views(local.x)["v"], center.values()["v"]


@given(x=values, c=values, α=rates)
def test_an_elastic_exchange_conserves_the_sum(x, c, α):
    x2, c2 = exchange_once(ElasticAverage(moving_rate=α), x, c)
    np.testing.assert_allclose(x2 + c2, x + c, rtol=0, atol=1e-12)
    assert (np.abs(x2 - c2) <= np.abs(x - c) + 1e-12).all()


@given(x=values, c=values, α=rates)
def test_an_elastic_swap_is_what_the_verbs_give(x, c, α):
    rule = ElasticAverage(moving_rate=α)
    mine, center, none = x.copy(), c.copy(), np.empty(0)
    assert rule.swap(mine, none, center, np.empty(N))
    m = rule.contribute(x, none, none, 0, np.empty(N))
    then = Point(np.empty(N), {})
    rule.outer.step(Point(c, {}), m, Exchange(), then)
    rule.adopt(x, none, c, np.empty(N))
    np.testing.assert_array_equal(mine, x)
    np.testing.assert_array_equal(center, then.c)


@given(c=values, g=values, rate=rates)
def test_a_step_in_place_is_a_step(c, g, rate):
    then, exchange = Point(np.empty(N), {}), Exchange(rate=rate)
    SGD(rate).step(Point(c, {}), g, exchange, then)
    assert SGD(rate).step_in_place(c, g, exchange, work=g)
    np.testing.assert_array_equal(c, then.c)


def test_a_step_of_ones_own_is_not_made_in_place_by_the_one_it_comes_from():
    class Halving(SGD):
        def step(self, now, g, exchange, then):
            super().step(now, g, exchange, then)
            np.multiply(then.c, 0.5, out=then.c)

    worker = Worker({"v": np.full(N, 3.0)}, AGN(period=1, outer=Halving(1.0)))
    worker.observe({"v": np.ones(N)})
    worker.step()
    assert worker.center.values()["v"].tolist() == [1.0] * N


def mean(messages):
    return reduce(messages, [1.0] * len(messages), np.zeros(N, messages[0].dtype), np.empty(N))


@given(xs=st.lists(values, min_size=1, max_size=5), order=st.randoms())
def test_averaging_does_not_depend_on_the_order(xs, order):
    shuffled = list(xs)
    order.shuffle(shuffled)
    np.testing.assert_allclose(mean(shuffled), mean(xs), rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean(xs), np.mean(xs, axis=0), rtol=0, atol=1e-12)


@given(xs=st.lists(values, min_size=1, max_size=4), weight=rates)
def test_a_weighted_mean_is_the_mean_of_weighted_messages(xs, weight):
    found = reduce(xs, [weight] * len(xs), np.zeros(N), np.empty(N))
    np.testing.assert_allclose(found, weight * np.mean(xs, axis=0), rtol=0, atol=1e-12)


@given(xs=st.lists(anything, min_size=2, max_size=4))
def test_the_mean_of_finite_values_is_finite(xs):
    xs = [np.nan_to_num(x) for x in xs]
    work = np.empty(N, np.float32)
    with np.errstate(over="raise", invalid="raise"):
        found = reduce(xs, [1.0] * len(xs), np.zeros(N, np.float32), work)
    assert np.isfinite(found).all()


@given(point=values, g=values)
@pytest.mark.parametrize("outer", OUTERS, ids=lambda o: o.kind)
def test_a_step_writes_nothing_but_the_next_point(outer, point, g):
    state = {k: np.full(shape, first) for k, (shape, first) in outer.state("v", (N,)).items()}
    now = Point(point, state)
    before = point.copy(), {k: v.copy() for k, v in state.items()}, g.copy()
    then = Point(np.full(N, np.nan), {k: np.full_like(v, np.nan) for k, v in state.items()})
    outer.step(now, g, Exchange(rate=0.1), then)
    np.testing.assert_array_equal(point, before[0])
    np.testing.assert_array_equal(g, before[2])
    for key, array in state.items():
        np.testing.assert_array_equal(array, before[1][key])
        assert np.isfinite(then.state[key]).all()
    assert np.isfinite(then.c).all()


@given(x=anything)
def test_is_finite(x):
    with np.errstate(over="raise", invalid="raise"):
        assert is_finite(x) == bool(np.isfinite(x).all())


def quadratic(targets):
    return lambda worker, step, x: {"v": x["v"] - targets[worker][step % len(targets[worker])]}


def run_worker(rule, inner, start, target, steps):
    """One worker alone on an in-process center."""
    worker, optimizer = Worker({"v": start}, rule), Optimizer(inner)
    gradient = quadratic([target])
    for step in range(steps):
        g = gradient(0, step, worker.parameters)
        worker.observe(g)
        optimizer.step(worker.parameters, g)
        worker.step()
    return worker


@settings(max_examples=25)
@given(start=values, targets=arrays(np.float64, (3, N), elements=st.floats(-100, 100)))
@pytest.mark.parametrize("inner", OUTERS, ids=lambda o: o.kind)
def test_averaging_with_one_worker_is_plain_training(inner, start, targets):
    worker = run_worker(ModelAverage(period=3), inner, start, targets, 10)
    x, optimizer = {"v": start.copy()}, Optimizer(inner)
    for step in range(10):
        optimizer.step(x, quadratic([targets])(0, step, x))
    np.testing.assert_array_equal(worker.parameters["v"], x["v"])


@settings(max_examples=25)
@given(start=values, targets=arrays(np.float64, (2, 3, N), elements=st.floats(-100, 100)))
def test_a_vanishing_moving_rate_leaves_workers_independent(start, targets):
    rule = ElasticAverage(period=2, workers=2, moving_rate=1e-15)
    twin = Twin(rule, {"v": start}, SGD(0.1), quadratic(targets))
    list(twin.run([0, 1] * 8))
    for k in range(2):
        alone, optimizer = {"v": start.copy()}, Optimizer(SGD(0.1))
        for step in range(8):
            optimizer.step(alone, quadratic(targets)(k, step, alone))
        np.testing.assert_allclose(twin.workers[k].x["v"], alone["v"], rtol=0, atol=1e-9)


@settings(max_examples=25)
@given(start=values, targets=arrays(np.float64, (3, N), elements=st.floats(-100, 100)))
@pytest.mark.parametrize("outer", OUTERS, ids=lambda o: o.kind)
@pytest.mark.parametrize("rule", [ElasticAverage, ModelAverage, AGN])
def test_one_worker_follows_the_twin(rule, outer, start, targets):
    extra = {"outer": outer} if rule is AGN else {}
    if rule is ElasticAverage:
        extra = {"rho": 0.1, "moving_rate": 0.3}
    made = rule(period=3, **extra)
    worker = run_worker(made, outer, start, targets, 10)
    twin = Twin(made, {"v": start}, outer, quadratic([targets]))
    list(twin.run([0] * 10))
    np.testing.assert_allclose(worker.parameters["v"], twin.workers[0].x["v"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(worker.center.values()["v"], twin.c["v"], rtol=0, atol=1e-9)
    assert worker.center.version == twin.global_step == 3
