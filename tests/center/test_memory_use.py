"""What a center holds: the model, outer state, a slot per worker, scratch for steps with state.

An exchange allocates nothing.
"""

import tracemalloc

import numpy as np
import pytest

from springline import AGN, ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import Layout
from springline.center.layout import BLOCK
from springline.center.plan import PAGE, Plan
from springline.rules import SGD, Adagrad, Adam, Momentum

# WorkerBlocks of a model beside its own: outer state (Adam keeps m, v and a few numbers), slots.
RULES = {
    "elastic": (ElasticAverage(workers=2, period=1), 0),
    "elastic with rho": (ElasticAverage(workers=2, period=1, rho=0.1), 0),
    "average": (ModelAverage(workers=2, period=1), 2),
    "sgd": (AGN(workers=2, period=1, outer=SGD(0.1)), 0),
    "momentum": (AGN(workers=2, period=1, outer=Momentum(0.1)), 1),
    "adagrad": (AGN(workers=2, period=1, outer=Adagrad(0.1)), 1),
    "adam": (AGN(workers=2, period=1, outer=Adam(0.1)), 2),
}
VALUES = {
    "half": np.ones(300_000, np.float16),
    "single": np.ones((1000, 1000), np.float32),
    "double": np.ones(100_000),
}
MODEL = Layout.of(VALUES).nbytes


@pytest.mark.parametrize("name", RULES)
def test_a_center_is_no_larger_than_it_must_be(name):
    rule, beside = RULES[name]
    plan = Plan.of(Layout.of(VALUES), rule, use_locking=True)
    assert sum(v.size * max(v.itemsize, 4) for v in VALUES.values()) <= MODEL
    journal = len(plan.shards) * (1 + beside) * (BLOCK + 64) if plan.journaled else 0
    assert (1 + beside) * MODEL < plan.nbytes <= (1 + beside) * MODEL + journal + 6 * PAGE


def test_many_workers_and_tensors_cost_little():
    values = {f"v{k}": np.zeros(1000, np.float32) for k in range(1000)}
    plan = Plan.of(Layout.of(values), ElasticAverage(workers=64), use_locking=True)
    assert plan.nbytes <= 1000 * 1000 * 4 * 1.01 + 3 * PAGE


@pytest.mark.parametrize(
    ("name", "use_locking"),
    [
        *[(name, True) for name in RULES],
        *[(name, False) for name in ("elastic", "elastic with rho", "average", "sgd")],
    ],
)
def test_an_exchange_allocates_nothing_after_the_first(name, use_locking, directory, background):
    rule, _ = RULES[name]
    options = {"use_locking": use_locking, "synchronous": False, "timeout": 30}
    workers = [Worker(VALUES, rule, directory, rank, **options) for rank in (0, 1)]
    gradients = {key: np.ones_like(value) for key, value in VALUES.items()}
    peaks = []
    for _ in range(3):
        for worker in workers:
            worker.observe(gradients)
        tracemalloc.start()
        for future in [background(worker.exchange) for worker in workers]:
            future.result(30)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks[1:]) < 100_000
    tracemalloc.start()
    np.zeros(50_000)
    assert tracemalloc.get_traced_memory()[1] > 200_000  # it does see numpy's memory
    tracemalloc.stop()
    for worker in workers:
        worker.center.close()


def test_the_memory_is_one_file_for_all(directory):
    rule = RULES["adam"][0]
    one = SharedCenter.create_or_join(directory, Layout.of(VALUES), rule, VALUES)
    with one, SharedCenter.open(directory) as two:
        assert one._path == two._path
        one.memory.center[:4] = 1
        np.testing.assert_array_equal(two.memory.center[:4], 1)
        assert one._path.stat().st_blocks * 512 == -(-one.plan.nbytes // PAGE) * PAGE
