"""DiLoCo and its relatives with any settings that go together, against the twin."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from springline import (
    AsyncDiLoCo,
    DiLoCo,
    ElasticAverage,
    LocalCenter,
    ModelAverage,
    SlowMo,
    Worker,
    outer,
)
from springline.center import Layout
from springline.rules import SGD
from springline.rules.reference import Optimizer, Twin
from springline.schedule import Warmup

RATE = 0.125
OUTERS = st.sampled_from(
    [None, outer.SGD(0.7), outer.Nesterov(0.5, 0.9), outer.Adam(0.1), outer.Adagrad(0.3)]
)
SHAPES = {"a": (3,), "b": (2, 2), "c": (), "d": (5,)}
NAMED = st.sampled_from([[["c", "a"], ["d", "b"]], [["d"], ["a"], ["b", "c"]]])


def start():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def gradient(rank, step, x):
    """Of a quadratic whose minimum moves with rank and step."""
    return {name: value - np.cos(rank + step / 3 + len(name)) for name, value in x.items()}


@st.composite
def pseudo_gradients(draw, kind, **more):
    """A rule of the family with settings that it does not refuse."""
    fragments = draw(st.integers(1, 4) | NAMED)
    count = len(fragments) if isinstance(fragments, list) else fragments
    gap = draw(st.integers(1, 4))
    delay = draw(st.integers(0, gap - 1))
    period = gap * count
    if not delay and draw(st.booleans()):
        period = Warmup(draw(st.integers(1, 5)), then=period)
    return kind(
        workers=draw(st.integers(1, 3)),
        period=period,
        fragments=fragments,
        delay=delay,
        mixing=draw(st.sampled_from([0.0, 0.25, 0.5])),
        outer=draw(OUTERS),
        **{key: draw(values) for key, values in more.items()},
    )


@st.composite
def others(draw):
    """The other rules cut into fragments."""
    kind, fragments = draw(st.sampled_from([ModelAverage, ElasticAverage, SlowMo])), draw(NAMED)
    period = len(fragments) * draw(st.integers(1, 4))
    return kind(workers=draw(st.integers(1, 3)), period=period, fragments=fragments)


def follow(rule, schedule):
    """Train workers and the twin side by side, and compare them after every step."""
    center = LocalCenter(Layout.of(start(), fragments=rule.fragments), rule, start())
    ranks = range(rule.workers)
    workers = [Worker(start(), rule, center, rank, synchronous=False, timeout=30) for rank in ranks]
    inners = [Optimizer(SGD(RATE)) for _ in workers]
    twin = Twin(rule, start(), SGD(RATE), gradient)

    def step(rank):
        worker = workers[rank]
        inners[rank].step(worker.parameters, gradient(rank, worker.local_step, worker.parameters))
        worker.step()

    for worker in workers:
        if rule.sends_rates:
            worker.set_learning_rate(RATE)
    with ThreadPoolExecutor(rule.workers) as threads:
        for stepped in twin.run(schedule):
            list(threads.map(step, stepped))
            for rank in stepped:
                if rule.delay:
                    workers[rank].background.save()  # once it is back
            for worker, right in zip(workers, twin.workers, strict=True):
                assert worker.local_step == right.local_step
                for name, x in right.x.items():
                    np.testing.assert_allclose(worker.parameters[name], x, rtol=0, atol=1e-9)
            for name, c in center.values().items():
                np.testing.assert_allclose(c, twin.c[name], rtol=0, atol=1e-9)
    assert center.version == twin.global_step


@settings(max_examples=40)
@given(rule=pseudo_gradients(DiLoCo) | others(), steps=st.integers(1, 30))
def test_rounds_follow_the_twin(rule, steps):
    together = list(range(rule.workers))
    follow(rule, [together] * steps if rule.rounds else [[r] for r in together] * steps)


@settings(max_examples=40)
@given(
    rule=pseudo_gradients(AsyncDiLoCo, staleness=st.sampled_from([None, "inverse", "sqrt"])),
    turns=st.lists(st.integers(0, 2), max_size=60),
)
def test_exchanges_without_rounds_follow_the_twin(rule, turns):
    follow(rule, [[rank % rule.workers] for rank in turns])
