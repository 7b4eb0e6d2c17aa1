"""DiLoCo and its relatives on every kind of center: fragments, delays, mixing and schedules."""

from functools import partial

import numpy as np
import pytest
from centers import on

from own_rules import Ahead, MeanOfPseudoGradients
from recorded import TORCHFT, adoptions, diloco_of, gradient, start
from springline import AGN, AsyncDiLoCo, DiLoCo, ElasticAverage, ModelAverage, SlowMo, outer
from springline.rules import SGD
from springline.rules.reference import Optimizer, Twin
from springline.schedule import QSR, Warmup


def run(place, rule, inner, together, ranks, buffers=None, **options):
    """Train workers and the twin side by side, and yield both after every step."""
    workers = place.workers(start(), rule, buffers=buffers, **options)
    rounds = workers[0].in_rounds
    twin = Twin(rule, start(), inner, gradient, buffers=buffers or {}, together=rounds)
    inners = [Optimizer(inner) for _ in workers]
    if rule.sends_rates:
        for worker in workers:
            worker.set_learning_rate(inner.learning_rate)

    def step(rank):
        worker = workers[rank]
        gradients = gradient(rank, worker.local_step, worker.parameters)
        worker.observe(gradients)
        inners[rank].step(worker.parameters, gradients)
        worker.step()

    for stepped in twin.run(ranks):
        together(*[lambda rank=rank: step(rank) for rank in stepped])
        yield workers, twin


def compare(workers, twin, atol=1e-6):
    for worker in workers:
        mine = twin.workers[worker.rank]
        for name, x in mine.x.items():
            np.testing.assert_allclose(worker.parameters[name], x, rtol=0, atol=atol)
        for name, b in mine.buffers.items():
            np.testing.assert_allclose(worker.buffers[name], b, rtol=0, atol=atol)


@pytest.mark.parametrize("name", TORCHFT)
@on("synchronous", fixed=True)
def test_what_torchft_recorded(place, name, together):
    rule, inner = diloco_of(name)
    rows = TORCHFT[name]["rows"]
    trained = run(place, rule, inner, together, [[0, 1]] * len(rows))
    for k, ((workers, twin), row) in enumerate(zip(trained, rows, strict=True)):
        compare(workers, twin)
        for worker in workers:
            for key, x in worker.parameters.items():
                np.testing.assert_allclose(x, row[worker.rank][key], rtol=0, atol=2e-5)
        if k in adoptions(name):
            for key, c in workers[0].center.values().items():
                np.testing.assert_allclose(c, row[2][key], rtol=0, atol=2e-5)


IN_ROUNDS = {
    "adam outside": lambda **k: DiLoCo(outer=outer.Adam(0.1), **k),
    "block momentum": lambda **k: DiLoCo(outer=outer.BlockMomentum(), **k),
    "block momentum, nesterov": lambda **k: DiLoCo(outer=outer.BlockMomentum(nesterov=True), **k),
    "slowmo": SlowMo,
    "rates by number": lambda **k: DiLoCo(outer=outer.SGD(lambda n: 1 / (n + 1)), **k),
    "two fragments": lambda **k: DiLoCo(fragments=2, **k),
    "delay": lambda **k: DiLoCo(delay=1, mixing=0.25, **k),
    "delay and fragments": lambda **k: DiLoCo(delay=1, fragments=[["b"], ["w"]], **k),
    "warm-up": lambda **k: DiLoCo(**k | {"period": Warmup(3, then=4)}),
    "qsr": lambda **k: ModelAverage(
        **k | {"period": QSR(1, 0.1, lambda step: 0.1 / (step + 1), steps=12)}
    ),
    "function of the step": lambda **k: ModelAverage(**k | {"period": lambda step: 1 + step // 3}),
    "average in fragments": lambda **k: ModelAverage(fragments=2, **k),
}
WITHOUT_ROUNDS = {
    "delayed nesterov": AsyncDiLoCo,
    "fewer pushes to a step": lambda **k: AsyncDiLoCo(
        outer=outer.DelayedNesterov(0.5, 0.9, every=3), **k
    ),
    "staleness": lambda **k: AsyncDiLoCo(staleness="sqrt", outer=outer.SGD(0.7), **k),
    "async, delay": lambda **k: AsyncDiLoCo(delay=1, mixing=0.5, **k),
    "async, fragments": lambda **k: AsyncDiLoCo(fragments=2, **k),
    "elastic in fragments": lambda **k: ElasticAverage(fragments=2, rho=0.1, **k),
    "agn in fragments": lambda **k: AGN(fragments=2, outer=outer.Adam(0.1), **k),
    "agn, warm-up": lambda **k: AGN(
        **k | {"period": Warmup(3, then=4), "outer": outer.Momentum(0.1)}
    ),
}


@pytest.mark.parametrize("name", IN_ROUNDS)
@on("synchronous", fixed=True)
def test_rounds_follow_the_twin(place, name, together):
    rule = IN_ROUNDS[name](workers=2, period=4)
    buffers = {"mean": np.arange(3, dtype=np.float32)}
    for workers, twin in run(place, rule, SGD(0.1), together, [[0, 1]] * 12, buffers):
        compare(workers, twin)
    assert workers[0].exchanges == twin.global_step == workers[0].center.version
    assert 0 < workers[0].distance < 10


@pytest.mark.parametrize("name", WITHOUT_ROUNDS)
@on("asynchronous")
def test_exchanges_without_rounds_follow_the_twin(place, name, together):
    rule = WITHOUT_ROUNDS[name](workers=2, period=4)
    schedule = [0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0] * 3
    for workers, twin in run(place, rule, SGD(0.1), together, schedule):
        if not rule.delay:
            compare(workers, twin)
        else:  # the other worker's message goes out in the background
            for worker in workers:
                worker.background.save()
            compare(workers, twin)
    assert workers[0].center.version == twin.global_step


@pytest.mark.parametrize(
    ("rule", "right"),
    [
        (AsyncDiLoCo(workers=2, period=1, outer=outer.SGD(0.5)), (1 / 3, 0.0)),
        (AGN(workers=2, period=1, outer=SGD(0.25)), (1 / 3, 0.0)),
        (ElasticAverage(workers=2, period=1, moving_rate=0.5), (0.5, 1 / 3)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@on("asynchronous")
def test_a_worker_is_as_far_from_every_center(place, rule, right):
    """From the `c` that it adopts: elastic averaging's is the one before its step."""
    for worker, distance in zip(place.workers({"w": np.ones(2)}, rule), right, strict=True):
        worker.observe({"w": np.full(2, 1.0 if rule.accumulates else 0.0)})
        worker.parameters["w"] -= 0.5
        worker.step()
        assert worker.distance == pytest.approx(distance)


@on("synchronous", fixed=True)
def test_all_fragments_are_in_the_center_at_the_end(place, together):
    rule = ModelAverage(workers=2, period=4, fragments=2)
    *_, (workers, _) = run(place, rule, SGD(0.1), together, [[0, 1]] * 5)
    right = {k: np.mean([w.parameters[k] for w in workers], axis=0) for k in start()}
    together(*[worker.finish for worker in workers])
    for name, c in workers[0].center.values().items():
        np.testing.assert_allclose(c, right[name], atol=1e-6)


@on("synchronous", fixed=True)
def test_bytes_are_those_of_the_fragments(place, together):
    rule = ModelAverage(workers=2, period=4, fragments=[["w"], ["b"]])
    *_, (workers, _) = run(place, rule, SGD(0.1), together, [[0, 1]] * 4)
    assert workers[0].exchanges == 2
    assert workers[0].bytes_exchanged == 2 * workers[0].layout.nbytes


COPIES = {
    "average": ModelAverage,
    "diloco": DiLoCo,
    "own rule": lambda **k: MeanOfPseudoGradients(outer=Ahead(), **k),
    "block momentum, rates by number": lambda **k: DiLoCo(
        outer=outer.BlockMomentum(lambda n: 1 / (n + 1), nesterov=True), **k
    ),
    **{name: IN_ROUNDS[name] for name in ("adam outside", "slowmo", "warm-up")},
    **{name: IN_ROUNDS[name] for name in ("delay and fragments", "average in fragments")},
}


@pytest.mark.parametrize("name", COPIES)
@on("synchronous", fixed=True)
def test_copies_of_each_other_are_noticed(place, name, together, caplog):
    """All see the same data; a run of workers that see their own says nothing."""

    def train(place, same):
        made = place.workers(start(), COPIES[name](workers=3, period=4))
        inners = [Optimizer(outer.Momentum(0.05)) for _ in made]

        def step(worker, inner):
            rank = 0 if same else worker.rank
            inner.step(worker.parameters, gradient(rank, worker.local_step, worker.parameters))
            worker.step()

        for worker in made:
            worker.set_learning_rate(0.05)
        for _ in range(20):
            together(*[partial(step, *both) for both in zip(made, inners, strict=True)])

    train(place.other(), same=False)
    assert "the same parameters" not in caplog.text
    train(place, same=True)
    warned = [r.getMessage() for r in caplog.records if "the same parameters" in r.getMessage()]
    assert sorted(text[:7] for text in warned) == [f"Rank {rank}:" for rank in range(3)]


@on("synchronous")
def test_who_was_alone_is_no_copy_of_who_joins(place, caplog):
    """The other comes too late for the round that makes this one suspicious."""
    rule = ModelAverage(workers=2, period=1)
    worker = place.worker(start(), rule, 0)
    exchange = worker.member.exchange

    def and_another_joins(local):
        done = exchange(local)
        place.worker(start(), rule, 1)
        return done

    for step in range(4):
        worker.parameters["w"] += 1
        if step == 3:
            worker.member.exchange = and_another_joins
        worker.step()
    assert worker.center.members() == [0, 1]
    assert "the same parameters" not in caplog.text


@pytest.mark.parametrize("fragments", [1, 2])
@on("synchronous")
def test_a_worker_that_joins_moves_nothing(place, fragments, background, together):
    """It comes with weights of its own, again and again, and the center goes its way to the bit.

    When it has stepped from the center's weights it counts as anybody else.
    """
    rule = DiLoCo(workers=2, period=2, fragments=fragments)
    twin = Twin(rule, start(), SGD(0.01), lambda rank, k, x: gradient(rank, k % 64, x))
    first, inner = place.worker(start(), rule), Optimizer(SGD(0.01))
    random = np.random.default_rng(0)

    def join():
        values = {n: 100 * random.standard_normal(v.shape, v.dtype) for n, v in start().items()}
        return place.worker(values, rule, 1)

    def come_and_go():
        for _ in range(100):
            late = join()
            late.parameters["w"] += 100
            leave = late.finish if random.integers(2) else late.member.leave
            leave()

    def step(worker):
        x = worker.parameters
        inner.step(x, gradient(worker.rank, worker.local_step % 64, x))
        worker.step()

    others = background(come_and_go)
    while not others.done() or not first.local_step or first.local_step % 2:
        list(twin.run([[0]]))
        step(first)
        for name, c in first.center.values().items():
            assert np.array_equal(c, twin.c[name])
    others.result()
    assert first.center.version == twin.global_step > 0
    late, its = join(), twin.workers[1]
    its.x, its.copy = ({n: c.copy() for n, c in twin.c.items()} for _ in range(2))
    for _ in twin.run([[0, 1]] * 4):
        together(lambda: step(first), lambda: step(late))
        compare((first, late), twin)
