"""What users of the originals waited for in vain."""

import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import tensorflow as tf
from tf_cluster import GETTERS, INNERS, PERIODS, Model, Servers, free_ports, together, wrap

from marks import slow
from springline.center import waiting
from springline.errors import RoundTimeoutError
from springline.tensorflow import cluster
from springline.tensorflow.cluster import Watch

v1 = tf.compat.v1
ways = pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])


def bowl(model):
    v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
    return tf.reduce_sum(tf.square(v))


def worker(servers, rule, k, hook, workers=2, inner="momentum", **options):
    build = partial(INNERS[inner], 0.1)
    return Model(servers, rule, k, workers, build, bowl, hook, **options)


@kinds
@pytest.mark.parametrize("inner", ["momentum", *slow("adagrad", "adam")])
@pytest.mark.parametrize("rule", GETTERS)
def test_nobody_waits_for_slots(rule, inner, resource):
    servers = Servers(1, 2)
    options = {"resource": resource, PERIODS[rule]: 1}
    options |= {"rho": 0.0} if rule == "elastic" else {}
    models = [worker(servers, rule, k, True, inner=inner, **options) for k in range(2)]
    for model in models:
        model.start()
    together(models, [None, None])
    assert models[1].values()["global_step"] == (1 if rule == "average" else 2)


@ways
@kinds
def test_synchronous_start(hook, resource):
    servers = Servers(1, 2)
    options = {"resource": resource, "synchronous": True, "communication_period": 1}
    models = [worker(servers, "elastic", k, hook, **options) for k in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Model.start, models))
    again = worker(servers, "elastic", 1, hook, **options)
    again.start()  # the barrier has been passed
    again.step()
    assert again.values()["global_step"] == 1


@ways
def test_synchronous_start_names_who_is_missing(hook):
    model = worker(Servers(1, 2), "elastic", 0, hook, synchronous=True, timeout=0.5)
    with pytest.raises(
        (RoundTimeoutError, tf.errors.InvalidArgumentError), match=r"missing.*/job:worker/task:1"
    ):
        model.start()


@ways
def test_silent_worker_is_named(hook):
    """The round fails after the timeout, and closes when the worker is there after all."""
    servers = Servers(2, 2)
    options = {"interval_steps": 1, "timeout": 0.5}
    models = [worker(servers, "average", k, hook, **options) for k in range(2)]
    for model in models:
        model.start()
    with pytest.raises(
        (RoundTimeoutError, tf.errors.InvalidArgumentError), match=r"missing.*/job:worker/task:1"
    ) as caught:
        models[0].step()
    assert "/job:worker/task:0" not in str(caught.value).partition("missing")[2][:60]
    models[1].step()
    assert models[1].values()["global_step"] == 1


def test_silent_worker_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "WARN_AFTER", 0.05)
    monkeypatch.setattr(waiting, "_warned", [])
    servers = Servers(1, 2)
    models = [worker(servers, "average", k, True, interval_steps=1) for k in range(2)]
    for model in models:
        model.start()
    warned, said = threading.Event(), []

    class Tell(logging.Handler):
        def emit(self, record):
            # The threads of other tests warn, too.
            if record.getMessage().startswith("Still waiting for"):
                said.append(record.getMessage())
                warned.set()

    handler = Tell(logging.WARNING)
    logging.getLogger("springline").addHandler(handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(models[0].step)
            assert warned.wait(30)
            assert not first.done()
            assert "/job:worker/task:1" in said[0]
            models[1].step()
            first.result()
    finally:
        logging.getLogger("springline").removeHandler(handler)


@ways
def test_restarted_worker_joins_the_next_round(hook):
    servers = Servers(1, 2)
    models = [worker(servers, "average", k, hook, interval_steps=1) for k in range(2)]
    for model in models:
        model.start()
    together(models, [None, None])
    models[1] = worker(servers, "average", 1, hook, interval_steps=1)
    models[1].start()
    together(models, [None, None])
    assert models[1].values()["global_step"] == 2


@ways
def test_contributes_once_though_restarted(hook):
    """A worker that dies while it waits, and comes back, is not two."""
    servers = Servers(1, 2)
    other = worker(servers, "average", 1, hook, inner="adam", interval_steps=1)
    for _ in range(2):
        dying = worker(servers, "average", 0, hook, inner="sgd", interval_steps=1, timeout=0.1)
        dying.start()
        with pytest.raises((RoundTimeoutError, tf.errors.InvalidArgumentError)):
            dying.step()
    other.start()
    other.step()
    values = other.values()
    assert values["global_step"] == 1
    assert values["center"]["v"] == pytest.approx([(0.8 + 0.9) / 2] * 2)


def test_rounds_of_two_optimizers():
    """They meet at the same time, and are not taken for each other's."""

    def build(model):
        model.u = v1.get_variable("u", initializer=1.0)
        return [(tf.constant(1.0), v1.get_variable("v", initializer=1.0))]

    servers, models = Servers(1, 2), []
    for k in range(2):
        model = Model(servers, "average", k, 2, lambda: INNERS["sgd"](0.1), build, interval_steps=1)
        with model.graph.as_default():
            other = wrap("average", INNERS["sgd"](0.1), 2, model.getter, k, interval_steps=1)
            pairs = [(tf.constant(1.0 + 2 * k), model.u)]
            model.train = [model.train, other.apply_gradients(pairs, model.global_step)]
            model.locals = v1.local_variables_initializer()
        models.append(model)
    for model in models:
        model.start()
    for _ in range(3):
        together(models, [None, None])
    values = models[0].values()
    assert values["center"] == pytest.approx({"u": 1 - 3 * 0.2, "v": 1 - 3 * 0.1})
    assert values["global_step"] == 6


def watches():
    return sys.modules[Watch.__module__]._watches


@pytest.mark.parametrize("rule", GETTERS)
def test_starts_without_the_others(rule, monkeypatch):
    """`cluster()`'s config: of two workers the second never comes, and nobody asks for it."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    jobs = {"ps": addresses[:1], "worker": addresses[1:]}
    served = tf.distribute.Server(tf.train.ClusterSpec(jobs), job_name="ps", task_index=0)
    config = {"cluster": jobs, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    place = cluster()
    assert served
    with tf.Graph().as_default():
        getter = GETTERS[rule](place.device)
        with v1.device(place.setter), v1.variable_scope("", custom_getter=getter):
            step = v1.train.get_or_create_global_step()
            loss = bowl(None)
        opt = wrap(rule, INNERS["momentum"](0.1), place.num_worker, getter)
        train = opt.minimize(loss, step)
        hook = (
            opt.make_session_run_hook()
            if rule == "average"
            else opt.make_session_run_hook(place.is_chief, place.task)
        )
        with v1.train.MonitoredTrainingSession(
            place.target, place.is_chief, hooks=[hook], config=place.config
        ) as session:
            session.run(train)
            assert session.run(loss) < 2
            assert not watches()[-1]._resting
    assert watches()[-1]._resting  # training has ended, and the script may go on without servers
