"""ρ, as in the twin: the loss gains `ρ·½‖x − c̃‖²`, of all variables that are trained."""

import pytest
import tensorflow as tf
from tf_cluster import INNERS, Model, Servers, close

import penalty
from marks import slow
from springline.tensorflow import ElasticAverageOptimizer

v1 = tf.compat.v1
OPTIONS = {
    "communication_period": penalty.PERIOD,
    "moving_rate": penalty.ALPHA,
    "rho": penalty.RHO,
}
inners = pytest.mark.parametrize("inner", penalty.INNERS)


def loss_of(table, rows):
    return tf.reduce_sum(tf.square(tf.gather(table, rows)))


@inners
@pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
@pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])
def test_the_penalty_in_a_graph(inner, resource, hook):
    def build(model):
        made = {
            name: v1.get_variable(name, initializer=value) for name, value in penalty.START.items()
        }
        model.rows = v1.placeholder(tf.int32, [2])
        with v1.device(model.getter.worker_device):
            model.away = v1.assign(made["idle"], [3.0, 3.0])
        return loss_of(made["table"], model.rows)

    def optimizer():
        return INNERS[inner](penalty.RATE)

    model = Model(Servers(1, 1), "elastic", 0, 1, optimizer, build, hook, resource, **OPTIONS)
    model.start()
    for step, (x, c) in enumerate(penalty.twin_rows(inner)):
        model.step({model.rows: penalty.ROWS[step]})
        values = model.values()
        for name in penalty.START:
            close(values["local"][name], x[name])
            close(values["center"][name], c[name])
        if step == 0:
            model.session.run(model.away)


@inners
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_the_penalty_in_eager_mode(inner, traced):
    made = {name: tf.Variable(value, name=name) for name, value in penalty.START.items()}
    opt = ElasticAverageOptimizer(INNERS[inner](penalty.RATE), 1, None, **OPTIONS)

    def step(rows):
        opt.minimize(lambda: loss_of(made["table"], rows), var_list=list(made.values()))

    step = tf.function(step) if traced else step
    for k, (x, _) in enumerate(penalty.twin_rows(inner)):
        step(tf.constant(penalty.ROWS[k]))
        for name, v in made.items():
            close(v, x[name])
        if k == 0:
            made["idle"].assign([3.0, 3.0])
    opt.finish()


def test_no_penalty_leaves_gradients_as_they_are():
    with tf.Graph().as_default():
        servers_free = Model(None, "elastic", 0, 1, lambda: INNERS["sgd"](0.1), embedded, rho=0.0)
        with servers_free.graph.as_default():
            pairs = servers_free.opt.compute_gradients(servers_free.loss)
    kinds = {v.op.name: type(g) for g, v in pairs}
    assert kinds == {"table": tf.IndexedSlices, "idle": type(None)}


def embedded(model):
    made = [v1.get_variable(name, initializer=value) for name, value in penalty.START.items()]
    model.loss = loss_of(made[0], [0, 1])
    return model.loss
