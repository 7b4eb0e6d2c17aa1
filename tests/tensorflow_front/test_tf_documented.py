"""Arguments, exceptions and attributes as the documents of `tf.contrib.opt` have them."""

import contextlib
import inspect
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from test_tf_checkpoints import kinds
from test_tf_input import Bench, rules
from tf_cluster import GETTERS, INNERS, PERIODS, Model, Servers, close, wrap

v1 = tf.compat.v1
hooks = pytest.mark.parametrize("hook", [True, False], ids=["hook", "op"])
OPTIONS = "gate_gradients=1, aggregation_method=None, colocate_gradients_with_ops=False"
SHARED = {
    "apply_gradients": "grads_and_vars, global_step=None, name=None",
    "compute_gradients": f"loss, var_list=None, {OPTIONS}, grad_loss=None",
    "minimize": f"loss, global_step=None, var_list=None, {OPTIONS}, name=None, grad_loss=None",
    "swapping_saver": "var_list=None, name='swapping_saver', **kwargs",
    "get_slot": "var, name",
    "get_init_op": "task_index",
    "make_session_run_hook": "is_chief, task_index",
    **dict.fromkeys(["get_name", "get_slot_names", "variables"], ""),
}
OWN = {
    "elastic": {
        "__init__": "opt, num_worker, ea_custom_getter, communication_period=10, moving_rate=None, "
        "rho=None, use_locking=True, synchronous=False, name='ElasticAverageOptimizer'"
    },
    "average": {
        "__init__": "opt, num_worker, is_chief, ma_custom_getter, interval_steps=100, "
        "use_locking=True, name='ModelAverageOptimizer'",
        **dict.fromkeys(["get_init_op", "make_session_run_hook"], ""),
    },
    "agn": {
        "__init__": "optimizer, num_worker, custom_getter, communication_period=10, "
        "use_locking=True, name='AGNOptimizer'"
    },
}


@rules
def test_arguments_in_their_order_with_their_defaults(rule):
    """What is ours alone comes after them, by name."""
    with tf.Graph().as_default():
        kind = type(Bench(rule).opt)
    for method, documented in (SHARED | OWN[rule]).items():
        _, *parameters = inspect.signature(getattr(kind, method)).parameters.values()
        if not documented.endswith("**kwargs"):
            parameters = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        plain = [str(p.replace(annotation=p.empty)) for p in parameters]
        assert ", ".join(plain) == documented, method


@hooks
@kinds
@rules
def test_a_variable_of_a_shape_that_is_not_known(rule, resource, hook):
    """`validate_shape=False`."""

    def build(model):
        first = v1.placeholder_with_default(np.zeros(3, np.float32), [None])
        v = v1.get_variable("v", initializer=first + 1, validate_shape=False)
        return tf.reduce_sum(v * [1.0, 2.0, 3.0])

    options = {"moving_rate": 0.5, "rho": 0.25} if rule == "elastic" else {}
    options |= {PERIODS[rule]: 1, "resource": resource}
    model = Model(Servers(1, 1), rule, 0, 1, lambda: INNERS["sgd"](1.0), build, hook, **options)
    model.start()
    for _ in range(2):
        model.step()
    # x: 0.5, then 0.5 − (1 + 0.25(0.5 − 1)) = −0.375; c: 0.5, then 0.5 + 0.5(−0.375 − 0.5).
    expected = [0.0625, -0.875, -1.8125] if rule == "elastic" else [-1, -3, -5]
    close(model.values()["center"]["v"], expected)


@rules
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_the_maps_of_the_getters(rule, resource):
    """Programs read them, the originals' own tests among them."""
    with tf.Graph().as_default():
        getter = GETTERS[rule]("")
        with v1.variable_scope("", custom_getter=getter, use_resource=resource):
            v = v1.get_variable("v", [2])
            parts = list(v1.get_variable("w", [4], partitioner=v1.fixed_size_partitioner(2)))
            still = v1.get_variable("still", [2], trainable=False)
    to_center = getter._local_2_global if rule == "average" else getter._global_map
    names = {"v": "v", "w/part_0": "w/part_0", "w/part_1": "w/part_1"}
    assert [x.op.name for x in to_center] == list(names)
    assert {x.op.name: c.op.name for x, c in to_center.items()} == {
        name: f"global_center_variable/{name}" for name in names
    }
    assert to_center[v] is getter.trio(v).center
    assert parts[1] in to_center
    assert still not in to_center
    assert to_center.get(still, still) is still
    with pytest.raises(TypeError):
        to_center[still] = v
    if rule != "average":
        kept = {"elastic": "local_center_variable", "agn": "grad_variable"}[rule]
        assert getter._local_map[v].op.name == f"{kept}/v"
        assert len(getter._local_map) == 3
    if rule == "agn":
        assert getter._grad_map[v] is getter._local_map[v]


references = pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
wrong = pytest.mark.parametrize(
    "make", [lambda: "x", lambda: 5, lambda: None, object, lambda: tf.constant(1.0)], ids=range(5)
)


@wrong
@references
@rules
def test_something_else_than_variables(rule, resource, make):
    """`compute_gradients` is to raise a TypeError, `minimize` a ValueError."""
    with tf.Graph().as_default():
        bench, other = Bench(rule, resource=resource), make()
        for var_list in ([other], [bench.v, other], (other,)):
            with pytest.raises(TypeError, match=r"`var_list` takes tf.Variables.*Received"):
                bench.opt.compute_gradients(bench.loss, var_list=var_list)
            with pytest.raises(ValueError, match=r"`var_list` takes tf.Variables.*Received"):
                bench.opt.minimize(bench.loss, bench.step, var_list=var_list)
        with pytest.raises(TypeError, match=r"`var_list` takes tf.Variables.*Received"):
            bench.opt.swapping_saver([other])
        if other is not None:
            with pytest.raises(TypeError, match=r"`global_step` takes tf.Variables.*Received"):
                bench.opt.minimize(bench.loss, other)


@references
@rules
def test_other_arguments_that_are_wrong(rule, resource):
    with tf.Graph().as_default():
        bench = Bench(rule, resource=resource)
        compute = bench.opt.compute_gradients
        for loss in (5.0, None, "x", lambda: 5.0):
            with pytest.raises(ValueError, match=r"`loss` must be a tensor.*Received"):
                compute(loss)
        with pytest.raises(ValueError, match=r"`grad_loss` must be a tensor.*Received: 'x'"):
            compute(bench.loss, grad_loss="x")
        with pytest.raises(ValueError, match="gate_gradients"):
            compute(bench.loss, gate_gradients=7)
        with pytest.raises(ValueError, match="aggregation_method"):
            compute(bench.loss, aggregation_method=99)
        with pytest.raises(ValueError, match="No variables"):
            compute(bench.loss, var_list=[])


@references
@rules
def test_a_loss_that_is_called(rule, resource):
    """By default for the trainable variables of the graph, also of reference variables."""
    with tf.Graph().as_default():
        bench = Bench(rule, resource=resource)
        ((g, v),) = bench.opt.compute_gradients(lambda: bench.loss)
        assert v is bench.v
        assert g is not None


@references
@rules
def test_variables_in_parts(rule, resource):
    with tf.Graph().as_default():
        bench = Bench(rule, resource=resource)
        with v1.variable_scope("", custom_getter=bench.getter, use_resource=resource):
            w = v1.get_variable("w", [4], partitioner=v1.fixed_size_partitioner(2))
        loss = bench.loss + tf.reduce_sum(tf.convert_to_tensor(w))
        pairs = bench.opt.compute_gradients(loss, var_list=[w])
        assert [v.op.name for _, v in pairs] == ["w/part_0", "w/part_1"]


class Clipping(v1.train.GradientDescentOptimizer):
    """An optimizer whose `compute_gradients` takes an argument of its own."""

    def compute_gradients(self, *args, most=None, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return pairs if most is None else [(tf.minimum(g, most), v) for g, v in pairs]


@rules
def test_arguments_of_the_wrapped_optimizer(rule):
    options = {"rho": 0.0} if rule == "elastic" else {}
    with tf.Graph().as_default():
        bench = Bench(rule, Clipping(0.1), **options)
        ((g, _),) = bench.opt.compute_gradients(bench.loss, [bench.v], most=0.5)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            assert session.run(g) == 0.5
    if rule == "agn":
        return  # in eager mode it has no optimizer like this one for the center
    v = tf.Variable(1.0)
    opt = wrap(rule, Clipping(0.1), 1, None, **options)
    ((g, _),) = opt.compute_gradients(lambda: v * v, [v], most=0.5)
    assert g.numpy() == 0.5


@rules
def test_grad_loss_in_eager_mode(rule):
    """`minimize` is to ignore it, `compute_gradients` is not."""
    options = {"rho": 0.0} if rule == "elastic" else {}
    opt = wrap(rule, INNERS["sgd"](0.1), 1, None, **options)
    v, step = tf.Variable(1.0), tf.Variable(0, dtype=tf.int64)
    opt.minimize(lambda: 2 * v, step, grad_loss=tf.constant(5.0))
    close(v.numpy(), 0.8)
    ((g, _),) = opt.compute_gradients(lambda: 2 * v, grad_loss=tf.constant(5.0))
    close(g.numpy(), 10)
    with pytest.raises(TypeError, match=r"`global_step` takes tf\.Variables"):
        opt.minimize(lambda: 2 * v, 5)


@references
def test_a_moving_rate_that_is_no_number(resource):
    for make in (lambda: tf.constant(0.5), lambda: v1.Variable(0.5)):
        with (
            tf.Graph().as_default(),
            pytest.raises(ValueError, match=r"`moving_rate` must be a number.*not a tensor"),
        ):
            Bench("elastic", resource=resource, moving_rate=make())


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", [v1.train.AdamOptimizer, v1.train.RMSPropOptimizer])
def test_a_default_rho_that_does_not_learn_warns(kind, eager):
    """Of these the step does not grow with the gradient, so ρ = 90 is all that they follow."""
    with contextlib.nullcontext() if eager else tf.Graph().as_default():
        getter = None if eager else GETTERS["elastic"]("")
        said = rf"0\.09 / 0\.001 = 90.*{kind.__name__}.*Give `rho=0\.0`"
        with pytest.warns(UserWarning, match=said) as caught:
            wrap("elastic", kind(0.001), 1, getter)
        assert [Path(w.filename).name for w in caught] == ["tf_cluster.py"]  # who made it
        wrap("elastic", kind(0.001), 1, getter, rho=0.0)
        wrap("elastic", INNERS["sgd"](0.001), 1, getter)
        wrap("elastic", INNERS["momentum"](0.001), 1, getter)
    with tf.Graph().as_default(), pytest.warns(UserWarning, match=r"moving_rate / learning_rate,"):
        wrap("elastic", kind(v1.placeholder(tf.float32, [])), 1, GETTERS["elastic"](""))
