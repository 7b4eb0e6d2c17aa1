"""Every kind of center agrees with the twin and with what TensorFlow 1.15.5 did, step by step."""

import numpy as np
import pytest
from centers import IN_ROUNDS, RULES, each, exchange_all, on

from recorded import RECORDED, gradient, rows, rule_of, schedule_of, start, twin_of
from springline.center import Layout, LayoutError
from springline.rules import SGD
from springline.rules.reference import Optimizer, Twin

SYNCHRONOUS = sorted(name for name in RECORDED if name.startswith("average"))
ASYNCHRONOUS = sorted(set(RECORDED) - set(SYNCHRONOUS))


def train(worker, inner, gradients):
    """One local step, as a training loop makes it."""
    worker.observe(gradients)
    inner.step(worker.parameters, gradients)
    worker.step()


def compare(worker, twin, atol=1e-6):
    """`x`, `c` and the version of one worker and of the twin."""
    for name, x in twin.workers[worker.rank].x.items():
        np.testing.assert_allclose(worker.parameters[name], x, rtol=0, atol=atol)
        np.testing.assert_allclose(worker.center.values()[name], twin.c[name], rtol=0, atol=atol)
    for name, b in twin.workers[worker.rank].buffers.items():
        np.testing.assert_allclose(worker.buffers[name], b, rtol=0, atol=atol)
        np.testing.assert_allclose(
            worker.center.values()[name], twin.center_buffers[name], rtol=0, atol=atol
        )
    assert worker.center.version == twin.global_step


def follow(place, name, together):
    """Run a recorded schedule on a center, and look after every step."""
    rule, inner = rule_of(name)
    twin, workers = twin_of(name), place.workers(start(), rule)
    inners = [Optimizer(inner) for _ in workers]

    def step(rank):
        worker = workers[rank]
        gradients = gradient(rank, worker.local_step, worker.parameters)
        train(worker, inners[rank], gradients)

    first, *others = rows(name)
    for entry in first:
        compare_recorded(workers[entry["worker"]], entry)
    for ranks, row in zip(twin.run(schedule_of(name)), others, strict=True):
        together(*[lambda rank=rank: step(rank) for rank in ranks])
        for entry in row:
            compare_recorded(workers[entry["worker"]], entry)
            compare(workers[entry["worker"]], twin)


def compare_recorded(worker, entry):
    center = worker.center.values()
    for name, x in worker.parameters.items():
        np.testing.assert_allclose(x, entry["local"][name], rtol=0, atol=2e-5)
        np.testing.assert_allclose(center[name], entry["center"][name], rtol=0, atol=2e-5)
    assert worker.center.version == entry["global_step"]


@pytest.mark.parametrize("run", ASYNCHRONOUS)
@on("asynchronous")
def test_recorded_asynchronous(place, run, together):
    follow(place, run, together)


@pytest.mark.parametrize("run", SYNCHRONOUS)
@on("synchronous", fixed=True)
def test_recorded_synchronous(place, run, together):
    follow(place, run, together)


@each(fixed=IN_ROUNDS)
def test_buffers_follow_the_twin(place, name, together):
    rule = RULES[name](workers=2, period=1)
    buffers = {"mean": np.zeros(3, np.float32), "var": np.ones((2, 2))}
    workers = place.workers(start(), rule, buffers=buffers)
    rounds = workers[0].in_rounds
    twin = Twin(rule, start(), SGD(0.1), gradient, buffers=buffers, together=rounds)
    inners = [Optimizer(SGD(0.1)) for _ in workers]
    rng = np.random.default_rng(0)
    for k in range(6):
        ranks = [0, 1] if rounds else [k % 2]
        for rank in ranks:
            for key, b in workers[rank].buffers.items():
                b += rng.standard_normal(b.shape).astype(b.dtype)
                twin.workers[rank].buffers[key] = b.copy()
        gradients = [gradient(r, workers[r].local_step, workers[r].parameters) for r in ranks]
        together(
            *[
                lambda r=r, g=g: train(workers[r], inners[r], g)
                for r, g in zip(ranks, gradients, strict=True)
            ]
        )
        for _ in twin.run([ranks]):
            for rank in ranks:
                compare(workers[rank], twin)


LARGE = {"w": (300, 500), "b": (7,), "d": (70_000,), "v": (400_000,)}


@each(fixed=IN_ROUNDS)
def test_large_models_follow_the_twin(place, name, together):
    """Several shards, several blocks in each; in a round every worker reduces some of them."""
    rng = np.random.default_rng(0)
    values = {k: rng.standard_normal(shape) for k, shape in LARGE.items()}
    values = {k: v if k == "d" else v.astype(np.float32) for k, v in values.items()}
    rule = RULES[name](workers=3, period=1)
    workers, inner = place.workers(values, rule), Optimizer(SGD(0.1))

    def outwards(rank, step, x):
        return {k: x[k] * (rank - 0.5) for k in x}

    twin = Twin(rule, values, SGD(0.1), outwards, together=workers[0].in_rounds)
    for ranks in twin.run([[0, 1, 2]] * 3):
        for rank in ranks:
            gradients = {k: x * (rank - 0.5) for k, x in workers[rank].parameters.items()}
            workers[rank].observe(gradients)
            inner.step(workers[rank].parameters, gradients)
        exchange_all(workers, together)
        for worker in workers:
            compare(worker, twin)


MIXED = {
    "half": np.full((2, 3), 0.5, np.float16),
    "single": np.ones(5, np.float32),
    "double": np.full((2, 1, 2), 2.0),
    "scalar": np.array(3, np.float32),
    "nothing": np.zeros((0, 4), np.float32),
    "double scalar": np.array(-1.0),
}
WIDE = {"float16": "float32", "float32": "float32", "float64": "float64"}


@each("elastic", "average", "agn-sgd", fixed=("elastic", "average"))
def test_several_dtypes_in_one_model(place, name, together):
    def ones(rank, step, x):
        return {key: np.full_like(value, rank + 1) for key, value in x.items()}

    rule = RULES[name](workers=2, period=1)
    buffers = {"half buffer": np.ones(2, np.float16), "empty buffer": np.zeros(0)}
    workers, inner = place.workers(MIXED, rule, buffers=buffers), Optimizer(SGD(1.0))
    together_too = workers[0].in_rounds
    twin = Twin(rule, MIXED, SGD(1.0), ones, buffers=buffers, together=together_too)
    for _ in twin.run([[0, 1], [0, 1]]):
        for worker in workers:
            gradients = ones(worker.rank, 0, worker.parameters)
            worker.observe(gradients)
            inner.step(worker.parameters, gradients)
        exchange_all(workers, together)
    for worker in workers:
        compare(worker, twin, atol=0)  # all of these numbers are exact in any dtype
        for key, value in MIXED.items():
            assert worker.parameters[key].dtype == value.dtype
            assert worker.center.values()[key].dtype == WIDE[str(value.dtype)]
            assert worker.center.values()[key].shape == value.shape


@pytest.mark.parametrize("kind", ["Parameter", "Buffer"])
def test_integers_are_refused_by_name(kind):
    tensors = {"w": np.zeros(2)}, {"b": np.zeros(2)}
    tensors[kind == "Buffer"]["count"] = np.zeros(2, np.int64)
    with pytest.raises(LayoutError, match=rf"{kind} 'count' has dtype int64.*Leave it out"):
        Layout.of(*tensors)
