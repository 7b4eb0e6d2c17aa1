"""The numbers that SPEC's readers can check by hand: unit rate, constant gradients."""

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, Model, Servers, close, together

from marks import slow

v1 = tf.compat.v1
ways = pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])


def sgd():
    return v1.train.GradientDescentOptimizer(1.0)


def scalars(*first, gradient=-1.0):
    """Variables v0, v1, ... and their gradients."""

    def build(model):
        made = [v1.get_variable(f"v{k}", initializer=float(x)) for k, x in enumerate(first)]
        return [(tf.constant(gradient), v) for v in made]

    return build


def check(model, local, center, global_step):
    values = model.values()
    close(list(values["local"].values()), local, 1e-6)
    close(list(values["center"].values()), center, 1e-6)
    assert values["global_step"] == global_step


@ways
@kinds
def test_elastic_one_worker(hook, resource):
    options = {"communication_period": 2, "moving_rate": 1.0}
    model = Model(
        Servers(1, 1), "elastic", 0, 1, sgd, scalars(0, 1), hook, resource=resource, **options
    )
    model.start()
    check(model, [0, 1], [0, 1], 0)
    model.step()
    check(model, [1, 2], [0, 1], 0)
    model.step()
    check(model, [0, 1], [2, 3], 1)
    model.step()
    check(model, [1, 2], [2, 3], 1)


@ways
@kinds
def test_elastic_two_workers(hook, resource):
    servers, options = Servers(1, 2), {"communication_period": 1, "moving_rate": 0.5}
    models = [
        Model(servers, "elastic", k, 2, sgd, scalars(0, 1), hook, resource=resource, **options)
        for k in range(2)
    ]
    for model in models:
        model.start()
    models[0].step()
    check(models[0], [0.5, 1.5], [0.5, 1.5], 1)
    models[1].step()
    check(models[0], [0.5, 1.5], [0.75, 1.75], 2)
    check(models[1], [0.75, 1.75], [0.75, 1.75], 2)


@ways
@kinds
def test_elastic_partitioned_over_two_servers(hook, resource):
    def build(model):
        v = v1.get_variable(
            "v",
            [2, 4],
            initializer=v1.zeros_initializer(),
            partitioner=v1.fixed_size_partitioner(2, axis=0),
        )
        model.devices = [part.device for part in v]
        return [(-tf.ones(part.shape), part) for part in v]

    servers, options = Servers(2, 2), {"communication_period": 1, "moving_rate": 0.5}
    models = [
        Model(servers, "elastic", k, 2, sgd, build, hook, resource=resource, **options)
        for k in range(2)
    ]
    for model in models:
        model.start()
    model = models[1]
    assert model.devices == ["/job:worker/task:1"] * 2
    tasks = [v1.DeviceSpec.from_string(trio.center.device).task for trio in model.trios]
    assert sorted(tasks) == [0, 1]
    models[0].step()
    models[1].step()
    half = np.ones([2, 1, 4])  # two parts
    check(models[0], half * 0.5, half * 0.75, 2)
    check(models[1], half * 0.75, half * 0.75, 2)


@ways
@kinds
def test_average(hook, resource):
    servers = Servers(1, 2)
    models = [
        Model(
            servers,
            "average",
            k,
            2,
            sgd,
            scalars(0, gradient=-1.0 - k),
            hook,
            resource=resource,
            interval_steps=2,
        )
        for k in range(2)
    ]
    for model in models:
        model.start()
    together(models, [None, None])
    check(models[0], [1], [0], 0)
    check(models[1], [2], [0], 0)
    together(models, [None, None])
    check(models[0], [3], [3], 1)
    check(models[1], [3], [3], 1)


def adam():
    return v1.train.AdamOptimizer(0.1, 0.0, 0.0)


@ways
@kinds
def test_agn_one_worker(hook, resource):
    model = Model(
        Servers(1, 1),
        "agn",
        0,
        1,
        adam,
        scalars(0, 0.5),
        hook,
        resource=resource,
        communication_period=4,
    )
    model.start()
    for _ in range(3):
        model.step()
    check(model, [0.3, 0.8], [0, 0.5], 0)
    model.step()
    check(model, [0.1, 0.6], [0.1, 0.6], 1)
    for _ in range(4):
        model.step()
    check(model, [0.2, 0.7], [0.2, 0.7], 2)


@ways
def test_agn_two_workers(hook):
    servers = Servers(1, 2)
    models = [
        Model(servers, "agn", k, 2, adam, scalars(0), hook, communication_period=1)
        for k in range(2)
    ]
    for model in models:
        model.start()
    for turn in range(6):
        models[turn % 2].step()
        check(models[turn % 2], [(turn + 1) / 10], [(turn + 1) / 10], turn + 1)


@pytest.mark.parametrize("rule", GETTERS)
@kinds
def test_placement(rule, resource):
    spec = tf.train.ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1"]})
    device = "/job:worker/task:1"
    setter = v1.train.replica_device_setter(worker_device=device, ps_device="/job:ps", cluster=spec)
    getter = GETTERS[rule](device)
    with (
        tf.Graph().as_default(),
        v1.device(setter),
        v1.variable_scope("", custom_getter=getter, use_resource=resource),
    ):
        v, w = (v1.get_variable(name, [2]) for name in "vw")
        assert [v.name, w.name] == ["v:0", "w:0"]
        trios = getter.trios()
        assert [trio.center.device for trio in trios] == ["/job:ps/task:0", "/job:ps/task:1"]
        assert [trio.center.name for trio in trios] == [
            "global_center_variable/v:0",
            "global_center_variable/w:0",
        ]
        beside = {"elastic": "local_center_variable", "agn": "grad_variable"}.get(rule)
        mine = [v, w]
        if beside:
            mine += [trio.beside for trio in trios]
            assert [trio.beside.name for trio in trios] == [f"{beside}/v:0", f"{beside}/w:0"]
        assert {variable.device for variable in mine} == {device}
        assert names(v1.trainable_variables()) == names([v, w])
        assert names(v1.local_variables()) == names(mine)
        assert names(v1.global_variables()) == names(trio.center for trio in trios)


def names(variables):
    return {variable.name for variable in variables}
