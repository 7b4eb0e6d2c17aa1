"""What users of the originals ran into: crashes, and what was missing."""

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, PERIODS, Model, Servers, close, wrap

from marks import slow

pytestmark = pytest.mark.filterwarnings("ignore:The default of `rho`")
v1 = tf.compat.v1
train = v1.train
ways = pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])
rules = pytest.mark.parametrize("rule", GETTERS)
EVERY = {
    "GradientDescent": lambda step: train.GradientDescentOptimizer(0.1),
    "Momentum": lambda step: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adam": lambda step: train.AdamOptimizer(0.1),
    "Adagrad": lambda step: train.AdagradOptimizer(0.1),
    "Adadelta": lambda step: train.AdadeltaOptimizer(0.1),
    "RMSProp": lambda step: train.RMSPropOptimizer(0.1, centered=True),
    "Ftrl": lambda step: train.FtrlOptimizer(0.1),
    "ProximalGradientDescent": lambda step: train.ProximalGradientDescentOptimizer(0.1),
    "ProximalAdagrad": lambda step: train.ProximalAdagradOptimizer(0.1),
    "AdagradDA": lambda step: train.AdagradDAOptimizer(0.1, step),
    "callable": lambda step: train.AdamOptimizer(lambda: 0.1),
    "callable of a tensor": lambda step: train.AdamOptimizer(lambda: tf.constant(0.1)),
    "tensor": lambda step: train.MomentumOptimizer(tf.constant(0.1), 0.9),
    "schedule": lambda step: train.AdamOptimizer(train.exponential_decay(0.1, step, 10, 0.9)),
    "variable": lambda step: train.GradientDescentOptimizer(
        v1.Variable(0.1, trainable=False, use_resource=False)
    ),
}


class Alone:
    """A process of its own: one worker, the center in its session."""

    def __init__(self, rule, inner, build, period=2, resource=True, **options):
        self.rule, self.graph = rule, tf.Graph()
        with self.graph.as_default():
            self.getter = GETTERS[rule]("")
            self.global_step = train.get_or_create_global_step()
            with v1.variable_scope("", custom_getter=self.getter, use_resource=resource):
                self.loss = build()
            options[PERIODS[rule]] = period
            self.opt = wrap(rule, inner(self.global_step), 1, self.getter, **options)
            self.train = self.opt.minimize(self.loss, self.global_step)
            self.trios = self.getter.trios()
            self.start()

    def start(self):
        init = self.opt.get_init_op() if self.rule == "average" else self.opt.get_init_op(0)
        self.session = v1.Session()
        self.session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        self.session.run(init)

    def losses(self, steps):
        """The loss before each step; in one run with it a reference may be read after it."""
        losses = []
        for _ in range(steps):
            losses.append(self.session.run(self.loss))
            self.session.run(self.train)
        return losses

    def centers(self):
        return self.session.run([trio.center for trio in self.trios])


def bowl(dtype=tf.float32):
    v = v1.get_variable("v", [3], dtype, v1.ones_initializer())
    return tf.reduce_sum(tf.square(v))


@kinds
@pytest.mark.parametrize("rule", ["elastic", *slow("average", "agn")])
@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer(name, rule, resource):
    alone = Alone(rule, EVERY[name], bowl, resource=resource)
    losses = alone.losses(5)
    assert losses[-1] < losses[0]
    assert alone.session.run(alone.global_step) == 2
    assert (alone.centers()[0] != 1).all()


@pytest.mark.parametrize("rate", [0.0, lambda: tf.constant(0.0)], ids=["zero", "tensor"])
def test_zero_rate_has_no_penalty(rate):
    alone = Alone("elastic", lambda step: train.GradientDescentOptimizer(rate), bowl)
    close(alone.losses(4), [3, 3, 3, 3])


def test_default_rho_is_rate_dependent():
    """`ρ = α / learning_rate`, so a step of SGD pulls by α."""
    alone = Alone("elastic", EVERY["GradientDescent"], bowl, moving_rate=0.25, period=100)
    (trio,) = alone.trios
    with alone.graph.as_default():
        alone.session.run(trio.local.assign([2.0, 2.0, 2.0]))  # c̃ is 1
    alone.losses(1)
    close(alone.session.run(trio.local), 2 - 0.1 * (4 + 0.25 / 0.1) * np.ones(3))


@kinds
@rules
@pytest.mark.parametrize("dtype", [tf.float16, tf.float64], ids=lambda d: d.name)
def test_dtypes(dtype, rule, resource):
    alone = Alone(rule, EVERY["Momentum"], lambda: bowl(dtype), resource=resource)
    losses = alone.losses(5)
    assert losses[-1] < losses[0]
    (trio,) = alone.trios
    for variable in trio:
        assert variable is None or variable.dtype.base_dtype == dtype
    assert alone.centers()[0].dtype == dtype.as_numpy_dtype


@ways
@kinds
@rules
def test_the_documents_example(rule, resource, hook):
    """All inside the getter's scope, with a variable as batch normalization has them."""

    servers, graph = Servers(1, 1), tf.Graph()
    device = "/job:worker/task:0"
    setter = train.replica_device_setter(
        worker_device=device, ps_device="/job:ps", cluster=servers.spec
    )
    getter = GETTERS[rule](device)
    with (
        graph.as_default(),
        v1.device(setter),
        v1.variable_scope(
            "",
            custom_getter=getter,
            use_resource=resource,
            partitioner=v1.fixed_size_partitioner(2),
        ),
    ):
        moving = v1.get_variable("moving", [2], trainable=False)
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        loss = tf.reduce_sum(tf.square(tf.convert_to_tensor(v)))
        step = train.get_or_create_global_step()
        with v1.device(device):
            opt = wrap(rule, train.MomentumOptimizer(0.1, 0.9), 1, getter, **{PERIODS[rule]: 2})
            op = opt.apply_gradients(opt.compute_gradients(loss), step)
        assert not [c for c in getter.trios() if "moving" in c.local.name]
        assert {variable.name for variable in v1.local_variables()} >= {
            variable.name for variable in opt._opt.variables()
        }
        hooks = []
        if hook:
            hooks = [
                opt.make_session_run_hook()
                if rule == "average"
                else opt.make_session_run_hook(True, 0)
            ]
    assert all("job:ps" in part.device for part in moving)
    with (
        graph.as_default(),
        train.MonitoredTrainingSession(
            servers.servers["worker", 0].target, hooks=hooks, log_step_count_steps=None
        ) as session,
    ):
        first = session.run(loss)
        for _ in range(4):
            session.run(op)
        assert session.run(loss) < first
        assert session.run(step) == 2


@ways
@kinds
@rules
def test_partitioned(rule, resource, hook):
    def build(model):
        v = v1.get_variable(
            "v",
            [5, 2],
            initializer=v1.ones_initializer(),
            partitioner=v1.fixed_size_partitioner(2),
        )
        return tf.reduce_sum(tf.square(tf.convert_to_tensor(v)))

    model = Model(
        Servers(2, 1),
        rule,
        0,
        1,
        lambda: train.AdamOptimizer(0.1),
        build,
        hook,
        resource=resource,
        **{PERIODS[rule]: 2},
    )
    model.start()
    for _ in range(4):
        model.step()
    values = model.values()
    assert values["global_step"] == 2
    assert [c.shape for c in values["center"].values()] == [(3, 2), (2, 2)]
    assert all((c < 1).all() for c in values["center"].values())


@rules
@kinds
def test_two_optimizers_in_one_graph(rule, resource):
    with tf.Graph().as_default():
        step = train.get_or_create_global_step()
        getter = GETTERS[rule]("")
        with v1.variable_scope("", custom_getter=getter, use_resource=resource):
            u, v = (v1.get_variable(n, initializer=1.0) for n in "uv")
        options = {PERIODS[rule]: 1}
        opts = [wrap(rule, train.AdamOptimizer(0.1), 1, getter, **options) for _ in range(2)]
        ops = [
            opt.minimize(tf.square(w), step, var_list=[w])
            for opt, w in zip(opts, (u, v), strict=True)
        ]
        init = [o.get_init_op() if rule == "average" else o.get_init_op(0) for o in opts]
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(init)
            for _ in range(3):
                session.run(ops)
            assert session.run(step) == 6
            for trio in getter.trios():
                assert session.run(trio.center) < 1


def embedded():
    table = v1.get_variable("table", [6, 2], initializer=v1.ones_initializer())
    return tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, [1, 3, 3])))


@kinds
@rules
@pytest.mark.parametrize("inner", ["GradientDescent", "Momentum", "Adam"])
def test_sparse_gradients(rule, inner, resource):
    alone = Alone(
        rule, EVERY[inner], embedded, resource=resource, **{"rho": 0.0} if rule == "elastic" else {}
    )
    losses = alone.losses(4)
    assert losses[-1] < losses[0]
    (center,) = alone.centers()
    assert (center[[1, 3]] < 1).all()
    close(center[[0, 2, 4, 5]], np.ones([4, 2]))


@pytest.mark.parametrize("scale", [4.0, [4.0, 4.0, 4.0]], ids=["scalar", "vector"])
def test_loss_scale_scales_the_penalty(scale):
    with tf.Graph().as_default():
        getter = GETTERS["elastic"]("")
        with v1.variable_scope("", custom_getter=getter):
            v = v1.get_variable("v", initializer=[1.0, 1.0, 1.0])
        opt = wrap("elastic", train.GradientDescentOptimizer(0.1), 1, getter, rho=0.5)
        loss = tf.reduce_sum(v) if np.ndim(scale) == 0 else tf.identity(v)
        ((g, _),) = opt.compute_gradients(loss, grad_loss=tf.constant(scale))
        init = opt.get_init_op(0)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(init)
            session.run(v.assign([3.0, 1.0, 1.0]))
            close(session.run(g), [4 * (1 + 0.5 * 2), 4, 4])


@rules
def test_slots_and_name(rule):
    with tf.Graph().as_default():
        getter = GETTERS[rule]("")
        with v1.variable_scope("", custom_getter=getter):
            v = v1.get_variable("v", [3])
        opt = wrap(rule, train.AdamOptimizer(0.1), 1, getter, name="Mine")
        assert opt.get_name() == "Mine"
        step = train.get_or_create_global_step()
        op = opt.minimize(tf.reduce_sum(v), step)
        assert op.name == "Mine"
        assert opt.minimize(tf.reduce_sum(v), step, name="other").name == "other"
        assert sorted(opt.get_slot_names()) == ["m", "v"]
        assert opt.get_slot(v, "m").op.name == "v/Adam"
        assert opt.get_slot(v, "nothing") is None
        names = [variable.op.name for variable in opt.variables()]
        assert len(names) == len(set(names))
        assert set(names) >= {"v/Adam", "v/Adam_1", "Mine/beta1_power", "Mine/beta2_power"}
        outer = [name for name in names if name.startswith("global_center_variable/")]
        assert len(outer) == (4 if rule == "agn" else 0)


def test_class_members():
    for rule, getter in GETTERS.items():
        with tf.Graph().as_default():
            opt = wrap(rule, train.GradientDescentOptimizer(0.1), 1, getter(""))
        assert (opt.GATE_NONE, opt.GATE_OP, opt.GATE_GRAPH) == (0, 1, 2)
        assert isinstance(opt, train.Optimizer)
        assert getattr(opt, "BETA", None) == (0.9 if rule == "elastic" else None)
