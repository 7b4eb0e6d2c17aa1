"""The twin itself: SPEC's numbers by hand, then nine runs recorded from TensorFlow 1.15.5."""

import numpy as np
import pytest

from recorded import RECORDED, rows, schedule_of, start, twin_of
from springline.rules import AGN, SGD, Adam, ElasticAverage, ModelAverage
from springline.rules.reference import Twin


def constant(*per_worker):
    """A gradient that is the same for every variable and step of a worker."""
    return lambda worker, step, x: {k: np.full_like(v, per_worker[worker]) for k, v in x.items()}


def variables(**values):
    return {name: np.array(value, np.float32) for name, value in values.items()}


def close(arrays, **expected):
    assert set(arrays) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value, rtol=0, atol=1e-6)


def test_elastic_one_worker():
    rule = ElasticAverage(period=2, moving_rate=1.0, workers=1)
    twin = Twin(rule, variables(v0=0, v1=1), SGD(1.0), constant(-1.0))
    run = twin.run([0, 0, 0])
    next(run)
    close(twin.workers[0].x, v0=1, v1=2)
    close(twin.c, v0=0, v1=1)
    assert twin.global_step == 0
    next(run)
    close(twin.workers[0].x, v0=0, v1=1)
    close(twin.c, v0=2, v1=3)
    assert twin.global_step == 1
    next(run)
    close(twin.workers[0].x, v0=1, v1=2)
    close(twin.c, v0=2, v1=3)


def test_the_penalty_is_of_all_variables():
    """`½ρ(x − c̃)²` of one without a gradient, too; without a penalty it stays where it is."""
    for rho, expected in (0.5, 3 - 0.1 * 0.5 * (3 - 1)), (0.0, 3.0):
        rule = ElasticAverage(period=9, moving_rate=0.5, workers=1, rho=rho)
        twin = Twin(rule, variables(v0=0, idle=1), SGD(0.1), lambda *_: {"v0": np.float32(0)})
        twin.workers[0].x["idle"][...] = 3
        next(twin.run([0]))
        close(twin.workers[0].x, v0=0, idle=expected)


@pytest.mark.parametrize("shape", [(), (2, 4)])
def test_elastic_two_workers(shape):
    rule = ElasticAverage(period=1, moving_rate=0.5, workers=2)
    first = {"v0": np.zeros(shape, np.float32), "v1": np.ones(shape, np.float32)}
    twin = Twin(rule, first, SGD(1.0), constant(-1.0, -1.0))
    list(twin.run([0, 1]))
    close(twin.workers[0].x, v0=np.full(shape, 0.5), v1=np.full(shape, 1.5))
    close(twin.workers[1].x, v0=np.full(shape, 0.75), v1=np.full(shape, 1.75))
    close(twin.c, v0=np.full(shape, 0.75), v1=np.full(shape, 1.75))
    assert twin.global_step == 2


def test_average_two_workers():
    twin = Twin(ModelAverage(period=2, workers=2), variables(v0=0), SGD(1.0), constant(-1.0, -2.0))
    run = twin.run([[0, 1], [0, 1]])
    next(run)
    close(twin.workers[0].x, v0=1)
    close(twin.c, v0=0)
    assert twin.global_step == 0
    next(run)
    close(twin.workers[0].x, v0=3)
    close(twin.workers[1].x, v0=3)
    close(twin.c, v0=3)
    assert twin.global_step == 1


def test_agn_one_worker():
    adam = Adam(0.1, beta1=0.0, beta2=0.0)
    twin = Twin(AGN(period=4, outer=adam), variables(v0=0, v1=0.5), adam, constant(-1.0))
    run = twin.run([0] * 8)
    for _ in range(3):
        next(run)
    close(twin.workers[0].x, v0=0.3, v1=0.8)
    close(twin.c, v0=0, v1=0.5)
    next(run)
    close(twin.workers[0].x, v0=0.1, v1=0.6)
    close(twin.c, v0=0.1, v1=0.6)
    list(run)
    close(twin.workers[0].x, v0=0.2, v1=0.7)
    close(twin.c, v0=0.2, v1=0.7)


def test_agn_two_workers_in_turn():
    adam = Adam(0.1, beta1=0.0, beta2=0.0)
    rule = AGN(period=1, workers=2, outer=adam)
    twin = Twin(rule, variables(v0=0), adam, constant(-1.0, -1.0))
    seen = [float(twin.c["v0"]) for _ in twin.run([0, 1] * 3)]
    np.testing.assert_allclose(seen, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], atol=1e-6)


def test_elastic_together_uses_the_center_from_before():
    rule = ElasticAverage(period=1, workers=2, moving_rate=0.25)
    twin = Twin(rule, variables(v=0), SGD(1.0), constant(-1.0, -3.0), together=True)
    list(twin.run([[0, 1]]))
    close(twin.c, v=0.25 * (1 + 3))
    close(twin.workers[0].x, v=0.75)
    close(twin.workers[1].x, v=2.25)
    assert twin.global_step == 1


def test_buffers_follow_the_workers():
    rule = ElasticAverage(period=1, workers=2, moving_rate=0.5)
    b = variables(b=0)
    twin = Twin(rule, variables(v=0), SGD(1.0), constant(-1.0, -1.0), buffers=b)
    twin.workers[0].buffers["b"][...] = 4
    twin.workers[1].buffers["b"][...] = 8
    list(twin.run([0, 1]))
    close(twin.workers[0].buffers, b=2)  # 0 + (4 − 0)/2
    close(twin.workers[1].buffers, b=5)  # 2 + (8 − 2)/2
    close(twin.center_buffers, b=5)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_trajectory(name):
    twin = twin_of(name)
    first, *others = rows(name)
    for entry in first:
        compare(twin, entry)
    for ranks, row in zip(twin.run(schedule_of(name)), others, strict=True):
        assert [entry["worker"] for entry in row] == ranks
        for entry in row:
            compare(twin, entry)


def compare(twin, entry):
    for key in start():
        x = twin.workers[entry["worker"]].x[key]
        np.testing.assert_allclose(x, entry["local"][key], atol=2e-5, rtol=0)
        np.testing.assert_allclose(twin.c[key], entry["center"][key], atol=2e-5, rtol=0)
    assert twin.global_step == entry["global_step"]


def test_there_are_nine():
    assert len(RECORDED) == 9
