"""What scripts for TensorFlow 1 do beside the documents' example."""

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, INNERS, PERIODS, Model, Servers, close, together, wrap

from marks import slow

v1 = tf.compat.v1
RULES = sorted(GETTERS)


def sgd():
    return INNERS["sgd"](1.0)


def started(model):
    model.start()
    return model


@pytest.mark.parametrize("kind", ["variable", "array", "number"])
@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_may_be_whatever_a_tensor_can_be_made_of(rule, kind):
    def build(model):
        v = v1.get_variable("v", [2], initializer=v1.zeros_initializer())
        with v1.variable_scope("", custom_getter=lambda getter, *args, **kw: getter(*args, **kw)):
            local = [v1.GraphKeys.LOCAL_VARIABLES]
            sums = v1.Variable([-1.0, -1.0], trainable=False, collections=local)
        return [({"variable": sums, "array": -np.ones(2), "number": [-1, -1]}[kind], v)]

    model = started(Model(None, rule, 0, 1, sgd, build, **{PERIODS[rule]: 100}))
    model.step()
    close(model.values()["local"]["v"], [1, 1])


def test_two_models_with_a_getter_each_in_one_graph():
    with tf.Graph().as_default():
        steps, opts, variables = [], [], []
        for k in range(2):
            getter = GETTERS["elastic"]("")
            with v1.variable_scope(f"model{k}", custom_getter=getter):
                v = v1.get_variable("v", [], initializer=v1.ones_initializer())
            variables.append((v, getter))
        for v, getter in variables:
            opts.append(wrap("elastic", INNERS["sgd"](0.1), 1, getter, communication_period=2))
            steps.append(opts[-1].minimize(tf.square(v)))
        inits = [opt.get_init_op(0) for opt in opts]
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(inits)
            session.run(steps[0])
            close(session.run([v for v, _ in variables]), [0.8, 1.0])
            session.run(steps)
            second = session.run(variables[1][0])
            close(second, 0.8)


@pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
def test_one_server_under_two_device_names_is_one_round(hook):
    def build(model):
        v = v1.get_variable("v", [], initializer=v1.zeros_initializer())
        with v1.device("/device:CPU:0"):
            w = v1.get_variable("w", [], initializer=v1.zeros_initializer())
        return [(tf.constant(-1.0 - model.worker), v), (tf.constant(-2.0), w)]

    servers = Servers(1, 2)
    models = [Model(servers, "average", k, 2, sgd, build, hook, interval_steps=1) for k in range(2)]
    for model in models:
        model.start()
    for n in range(1, 4):
        together(models, [None, None])
        for model in models:
            values = model.values()
            assert values["global_step"] == n
            close([values["center"]["v"], values["center"]["w"]], [1.5 * n, 2.0 * n])


@pytest.mark.parametrize("hook", [False, True], ids=["op", "hook"])
def test_a_name_scope_of_its_own_does_not_part_a_worker_from_the_round(hook):
    def build(model):
        v = v1.get_variable("v", [], initializer=v1.zeros_initializer())
        model.graph.unique_name("ModelAverageOptimizer") if model.worker else None
        return [(tf.constant(-1.0 - model.worker), v)]

    servers = Servers(1, 2)
    models = [Model(servers, "average", k, 2, sgd, build, hook, interval_steps=1) for k in range(2)]
    for model in models:
        model.start()
    together(models, [None, None])
    assert [model.values()["center"]["v"] for model in models] == [1.5, 1.5]


@pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
@pytest.mark.parametrize("rule", RULES)
def test_two_train_operations_of_one_optimizer_count_for_themselves(rule, hook):
    """As for a generator and its critic, which takes more steps."""

    def build(model):
        model.u = v1.get_variable("u", [], initializer=v1.zeros_initializer())
        return [(tf.constant(-1.0), v1.get_variable("v", [], initializer=v1.zeros_initializer()))]

    model = Model(Servers(1, 1), rule, 0, 1, sgd, build, hook, **{PERIODS[rule]: 2})
    with model.graph.as_default():
        other = model.opt.apply_gradients([(tf.constant(-1.0), model.u)], model.global_step)
        model.locals = v1.local_variables_initializer()
    model.start()
    for step, exchanges in [(model.train, 0), (other, 0), (model.train, 1), (other, 2), (other, 2)]:
        model.session.run(step)
        assert model.values()["global_step"] == exchanges
    model.session.run([model.train, other])
    assert model.values()["global_step"] == 3


@pytest.mark.parametrize("scale", [4.0, "dynamic"])
def test_agn_with_a_loss_scale_has_two_optimizers(scale):
    """The center's is that inside, one of its own."""

    def build(model):
        return tf.square(v1.get_variable("v", [], initializer=v1.ones_initializer()))

    def inner():
        return v1.mixed_precision.MixedPrecisionLossScaleOptimizer(INNERS["momentum"](0.1), scale)

    model = started(Model(None, "agn", 0, 1, inner, build, communication_period=2))
    with model.graph.as_default():
        (momentum,) = model.opt.outer.variables()
    assert momentum.op.name == "global_center_variable/v/Momentum"
    x = [1.0]  # momentum on the worker
    m = 0.0
    for _ in range(2):
        m = 0.9 * m + 2 * x[-1]
        x.append(x[-1] - 0.1 * m)
    for _ in range(2):
        model.step()
    close(model.values()["center"]["v"], 1 - 0.1 * (2 * x[0] + 2 * x[1]) / 2)


def test_agn_goes_on_after_a_gradient_that_was_not_finite():
    def build(model):
        v = v1.get_variable("v", [], initializer=v1.zeros_initializer())
        model.g = v1.placeholder(tf.float32, [])
        return [(model.g, v)]

    model = started(Model(None, "agn", 0, 1, sgd, build, communication_period=1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'v' has NaN or Inf"):
        model.step({model.g: np.nan})
    assert model.values()["center"]["v"] == 0
    model.step({model.g: -1.0})
    assert model.values()["center"]["v"] == 1
