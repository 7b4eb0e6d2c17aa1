"""Eager mode and `tf.function`: the same numbers, without a cluster."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import INNERS, close, wrap
from tf_eager import MODES, Trainer, alone, check, sgd, team, v1

from recorded import DATA, RECORDED, gradient, rows, schedule_of, start, twin_of
from springline.center import NonFiniteError
from springline.rules import AGN, ElasticAverage, ModelAverage, Momentum
from springline.rules.reference import Twin
from springline.tensorflow import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from springline.tensorflow.eager import EagerCenter

__all__ = ["alone", "team"]


def linear(variables, x, y):
    """The loss of the recorded runs."""
    return tf.reduce_mean(tf.square(tf.matmul(x, variables["w"]) + variables["b"] - y))


# The recorded runs.


def recorded(name, rank, workers, function):
    config = RECORDED[name]["config"]
    inner = INNERS[config["opt"]](config["lr"])
    opt = wrap(config["rule"], inner, workers, None, rank, **config.get("kwargs", {}))
    return Trainer(opt, start(), linear, function=function)


@MODES
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded(name, function, team, together):
    workers = RECORDED[name]["config"]["workers"]
    trainers = team(workers, lambda rank: recorded(name, rank, workers, function))
    together(*[trainer.join for trainer in trainers])
    twin = twin_of(name)
    steps = [0] * workers
    for ranks, row in zip(twin.run(schedule_of(name)), rows(name)[1:], strict=True):
        batches = [(DATA[k][0][steps[k]], DATA[k][1][steps[k]]) for k in ranks]
        due = together(
            *[partial(trainers[k].step, *b) for k, b in zip(ranks, batches, strict=True)]
        )
        for k in ranks:
            steps[k] += 1
        for entry in row:
            trainer = trainers[entry["worker"]]
            assert trainer.worker.center.version == entry["global_step"] == twin.global_step
            if due[ranks.index(entry["worker"])]:
                assert trainer.global_step.numpy() == entry["global_step"]
            for key in ("w", "b"):
                close(trainer.x()[key], entry["local"][key])
                close(trainer.c()[key], entry["center"][key])
                close(trainer.x()[key], twin.workers[entry["worker"]].x[key])


@MODES
@pytest.mark.parametrize("rule", ["elastic", "average", "agn"])
def test_one_worker_is_its_twin(rule, function):
    """Without any run: a center of the worker's own, in this process."""
    inner = Momentum(0.1)
    period, rho = 3, 0.2
    rules = {
        "elastic": ElasticAverage(period=period, moving_rate=0.5, rho=rho),
        "average": ModelAverage(period=period),
        "agn": AGN(period=period, outer=inner),
    }
    options = {
        "elastic": {"communication_period": period, "moving_rate": 0.5, "rho": rho},
        "average": {"interval_steps": period},
        "agn": {"communication_period": period},
    }
    opt = wrap(rule, INNERS["momentum"](0.1), 1, None, **options[rule])
    trainer = Trainer(opt, start(), linear, function=function)
    twin = Twin(rules[rule], start(), inner, gradient)
    for step, _ in enumerate(twin.run([0] * 10)):
        trainer.step(DATA[0][0][step], DATA[0][1][step])
        for key in ("w", "b"):
            close(trainer.x()[key], twin.workers[0].x[key])
            close(trainer.c()[key], twin.c[key])
        assert trainer.global_step.numpy() == twin.global_step
    assert twin.global_step == 3


# SPEC's numbers.


@MODES
def test_elastic_one_worker(function):
    opt = ElasticAverageOptimizer(sgd(1.0), 1, None, 2, 1.0)
    trainer = Trainer(opt, {"v0": 0.0, "v1": 1.0}, function=function)
    assert not trainer.step()
    check(trainer, (1, 2), (0, 1), 0)
    assert trainer.step()
    check(trainer, (0, 1), (2, 3), 1)
    trainer.step()
    check(trainer, (1, 2), (2, 3), 1)


@MODES
def test_elastic_two_workers(function, team):
    def make(rank):
        opt = ElasticAverageOptimizer(sgd(1.0), 2, None, 1, 0.5)
        return Trainer(opt, {"v0": 0.0, "v1": 1.0}, function=function)

    zero, one = team(2, make)
    one.join()
    zero.step()
    one.step()
    check(zero, (0.5, 1.5), (0.75, 1.75), 1)
    check(one, (0.75, 1.75), global_step=2)


@MODES
def test_average_two_workers(function, team, together):
    def make(rank):
        opt = ModelAverageOptimizer(sgd(1.0), 2, rank == 0, None, 2)
        return Trainer(opt, {"v0": 0.0}, given=-1.0 - rank, function=function)

    zero, one = team(2, make)
    together(zero.step, one.step)
    check(zero, (1,), (0,), 0)
    together(zero.step, one.step)
    for trainer in (zero, one):
        check(trainer, (3,), (3,), 1)


@MODES
def test_agn_one_worker(function):
    opt = AGNOptimizer(v1.train.AdamOptimizer(0.1, 0.0, 0.0), 1, None, 4)
    trainer = Trainer(opt, {"v0": 0.0, "v1": 0.5}, function=function)
    for _ in range(3):
        trainer.step()
    check(trainer, (0.3, 0.8), (0, 0.5), 0)
    trainer.step()
    check(trainer, (0.1, 0.6), (0.1, 0.6), 1)
    for _ in range(4):
        trainer.step()
    check(trainer, (0.2, 0.7), (0.2, 0.7), 2)


@MODES
def test_agn_two_workers_in_turn(function, team):
    def make(rank):
        opt = AGNOptimizer(v1.train.AdamOptimizer(0.1, 0.0, 0.0), 2, None, 1)
        return Trainer(opt, {"v0": 0.0}, function=function)

    trainers = team(2, make)
    for turn in range(6):
        trainers[turn % 2].step()
        check(trainers[turn % 2], [0.1 * (turn + 1)], [0.1 * (turn + 1)], turn + 1)


# What a step does, and what it does not.


def test_python_is_called_for_exchanges_only(monkeypatch):
    calls = []
    swap = EagerCenter._swap
    monkeypatch.setattr(
        EagerCenter, "_swap", lambda self, *args: [calls.append(args), swap(self, *args)][1]
    )
    trainer = Trainer(
        ElasticAverageOptimizer(sgd(1.0), 1, None, 3, 0.5, rho=0.1), {"v": 0.0}, function=True
    )
    for _ in range(8):
        trainer.step()
    assert len(calls) == 2


def test_a_loop_inside_a_function_is_the_same():
    """Each step reads what the exchange before it has written."""

    def make():
        opt = ElasticAverageOptimizer(INNERS["momentum"](0.1), 1, None, 2, 0.5, rho=0.3)
        return Trainer(opt, {"v": [1.0, -2.0]}, lambda v: tf.reduce_sum(v["v"] ** 4))

    plain, looped = make(), make()
    for _ in range(7):
        plain.step()

    @tf.function
    def steps():
        for _ in tf.range(7):
            looped._plain()

    steps()
    assert looped.global_step.numpy() == plain.global_step.numpy() == 3
    close(looped.x()["v"], plain.x()["v"])
    close(looped.c()["v"], plain.c()["v"])


def test_eager_steps_and_functions_mix():
    trainer = Trainer(ElasticAverageOptimizer(sgd(1.0), 1, None, 2, 1.0), {"v": 0.0})
    traced = tf.function(trainer._plain)
    trainer.step()
    traced()
    check(trainer, [0], [2], 1)
    traced()
    trainer.step()
    check(trainer, [2], [2], 2)


@MODES
def test_a_value_that_was_read_does_not_change(function):
    first = np.zeros(1000, np.float32)
    trainer = Trainer(
        ElasticAverageOptimizer(sgd(1.0), 1, None, 1, 0.5), {"v": first}, function=function
    )
    trainer.step()
    before = trainer.variables["v"].read_value()
    trainer.step()
    trainer.worker.local.x[:] = 0
    close(before, np.full(1000, 0.5))
    close(trainer.x()["v"], np.full(1000, 1.0))


@MODES
def test_who_comes_later_starts_from_the_center(function, team):
    """Also its first gradient is of the center, and not of the values it came with."""

    def make(rank):
        opt = ElasticAverageOptimizer(sgd(0.25), 2, None, 10, rho=0.0)
        first = {"v": 4.0 + 100 * rank}
        return Trainer(opt, first, lambda v: v["v"] ** 2, function=function)

    zero, one = team(2, make)
    zero.step()
    one.step()
    assert zero.x() == one.x() == {"v": 2.0}


@MODES
def test_agn_skips_what_had_no_gradient(function):
    """Its outer momentum must not move it either."""
    opt = AGNOptimizer(INNERS["momentum"](1.0), 1, None, 1)
    v, w = tf.Variable(0.0, name="v"), tf.Variable(0.0, name="w")

    def both():
        opt.apply_gradients([(tf.constant(-1.0), v), (tf.constant(-1.0), w)])

    def first():
        opt.apply_gradients([(tf.constant(-1.0), v), (None, w)])

    both, first = (tf.function(f) if function else f for f in (both, first))
    both()
    first()
    close([v, w], [1 + 1.9, 1])
    both()
    close([v, w], [2.9 + 2.71, 1 + 1.9])


@MODES
def test_agn_sends_its_learning_rate(function):
    rate = tf.Variable(1.0)
    trainer = Trainer(AGNOptimizer(sgd(lambda: rate), 1, None, 2), {"v": 0.0}, function=function)
    for value in (1.0, 0.5):
        rate.assign(value)
        trainer.step()
        trainer.step()
    check(trainer, [1.5], [1.5])


@MODES
def test_the_default_rho_follows_the_learning_rate(function):
    rate = tf.Variable(0.5)
    opt = ElasticAverageOptimizer(sgd(rate), 1, None, 10, 0.25)  # ρ = 0.25 / rate
    trainer = Trainer(opt, {"v": 0.0}, lambda v: -v["v"], function=function)
    x = 0.0
    for value in (0.5, 0.25, 1.0):
        rate.assign(value)
        trainer.step()
        x += value * (1 - 0.25 / value * x)
        check(trainer, [x])


@MODES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("rule", ["elastic", "average", "agn"])
def test_dtypes(rule, dtype, function):
    options = {"moving_rate": 0.5, "rho": 0.5} if rule == "elastic" else {}
    period = "interval_steps" if rule == "average" else "communication_period"
    opt = wrap(rule, sgd(0.5), 1, None, **{period: 2}, **options)
    first = {"v": tf.constant([4.0, -2.0], dtype)}
    trainer = Trainer(opt, first, lambda v: tf.reduce_sum(v["v"] ** 2) / 2, function=function)
    for _ in range(2):
        trainer.step()
    expected = {
        "elastic": (2.75, 2.75),  # x: 2, then 2 − 0.5(2 + 0.5(2 − 4)) = 1.5; c was 4
        "average": (1.0, 1.0),
        "agn": (2.5, 2.5),  # 4 − 0.5 · (4 + 2)/2
    }[rule]
    assert trainer.variables["v"].dtype == dtype
    close(trainer.x()["v"].astype(float), np.multiply([1, -0.5], expected[0]))
    close(trainer.c()["v"], np.multiply([1, -0.5], expected[1]))


@MODES
@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_sparse_gradients(rule, function):
    options = {"moving_rate": 0.5, "rho": 0.0} if rule == "elastic" else {}
    opt = wrap(rule, sgd(1.0), 1, None, communication_period=2, **options)

    def loss(v):
        return -tf.reduce_sum(tf.gather(v["v"], [1, 1, 3]))

    trainer = Trainer(opt, {"v": np.zeros((4, 2))}, loss, function=function)
    trainer.step()
    close(trainer.x()["v"][:, 0], [0, 2, 0, 1])
    trainer.step()
    close(trainer.x()["v"][:, 0], [0, 2, 0, 1])
    close(trainer.c()["v"][:, 1], [0, 2, 0, 1])


@MODES
def test_non_finite_values_do_not_reach_the_center(function):
    trainer = Trainer(
        AGNOptimizer(sgd(1.0), 1, None, 1), {"v": 0.0}, given=float("nan"), function=function
    )
    with pytest.raises((NonFiniteError, tf.errors.UnknownError), match="'v'"):
        trainer.step()
    assert trainer.c() == {"v": 0.0}
    assert trainer.global_step.numpy() == 0


def test_state_of_the_center_is_locked_whatever_old_code_says():
    v = tf.Variable([1.0])
    opt = AGNOptimizer(
        v1.train.AdamOptimizer(0.1), 1, None, communication_period=1, use_locking=False
    )
    opt.minimize(lambda: tf.reduce_sum(v * v), var_list=[v])
    assert float(v[0]) == pytest.approx(0.9, abs=1e-5)
