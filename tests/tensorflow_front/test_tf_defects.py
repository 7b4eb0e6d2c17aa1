"""What users of the originals ran into: wrong results."""

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, PERIODS, Model, Servers, close, held, together, wrap

from marks import slow

v1 = tf.compat.v1
ways = pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])
rules = pytest.mark.parametrize("rule", GETTERS)


def sgd(rate=1.0):
    return v1.train.GradientDescentOptimizer(rate)


def zeros(shape, gradient=-1.0, count=1):
    """Variables of zeros and their gradients."""

    def build(model):
        made = [
            v1.get_variable(f"v{k}", shape, initializer=v1.zeros_initializer())
            for k in range(count)
        ]
        return [(tf.fill(v.shape, gradient), v) for v in made]

    return build


@ways
@kinds
def test_agn_sends_values_not_buffers(hook, resource):
    build = zeros([400_000], -3.0, count=4)
    model = Model(
        Servers(1, 1), "agn", 0, 1, sgd, build, hook, resource=resource, communication_period=2
    )
    model.start()
    for exchange in range(1, 16):
        model.step()
        model.step()
        for c in model.values()["center"].values():
            np.testing.assert_array_equal(c, np.full_like(c, 3.0 * exchange))


def test_agn_center_has_an_optimizer_of_its_own():
    """Adam's powers advance once for every exchange of any worker, and are one for all."""
    servers = Servers(1, 2)
    models = [
        Model(
            servers,
            "agn",
            k,
            2,
            lambda: v1.train.AdamOptimizer(0.1, 0.5, 0.5),
            zeros([], 1.0),
            communication_period=1,
        )
        for k in range(2)
    ]
    for model in models:
        model.start()
    for turn in range(3):
        models[turn % 2].step()
    for model, steps in zip(models, (2, 1), strict=True):
        with model.graph.as_default():
            state = model.opt.variables()
            powers = {
                (v.device.partition(":")[2][:2], model.session.run(v))
                for v in state
                if "power" in v.name
            }
        assert powers == {("wo", 0.5 ** (steps + 1)), ("ps", 0.5**4)}
        own = {v.name for v in v1_global(model)}
        assert own >= {v.name for v in state if "ps" in v.device}
        assert not own & {v.name for v in state if "worker" in v.device}


def v1_global(model):
    with model.graph.as_default():
        return v1.global_variables()


def test_subset_is_pulled_to_its_own_center():
    with tf.Graph().as_default():
        getter = GETTERS["elastic"]("")
        with v1.variable_scope("", custom_getter=getter):
            u = v1.get_variable("u", initializer=[1.0, 2.0])
            v = v1.get_variable("v", initializer=[5.0, 6.0])
            w = v1.get_variable("w", initializer=[7.0, 8.0, 9.0])
        opt = wrap("elastic", sgd(), 1, getter, rho=0.5)
        loss = tf.reduce_sum(u) + tf.reduce_sum(v) + tf.reduce_sum(w)
        pairs = opt.compute_gradients(loss, var_list=[w, v])
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(opt.get_init_op(0))
            session.run([v.assign_add([1.0, 1.0]), u.assign_add([9.0, 9.0])])
            of_w, of_v = session.run([g for g, _ in pairs])
    assert [x.name for _, x in pairs] == ["w:0", "v:0"]
    close(of_v, [1.5, 1.5])
    close(of_w, [1.0, 1.0, 1.0])


@ways
@rules
def test_subset_is_all_that_is_trained(rule, hook):
    def build(model):
        for name in "uvw":
            v1.get_variable(name, [2], initializer=v1.ones_initializer())
        model.v = v1.trainable_variables()[1]
        return [(tf.constant([1.0, 1.0]), model.v)]

    model = Model(Servers(2, 1), rule, 0, 1, lambda: sgd(0.5), build, hook, **{PERIODS[rule]: 1})
    model.start()
    model.step()
    values = model.values()
    for name in "uw":
        close(values["local"][name], [1, 1])
        close(values["center"][name], [1, 1])
    assert (values["center"]["v"] < 1).all()
    assert values["global_step"] == 1


@ways
@rules
def test_all_start_from_the_center(rule, hook):
    def build(model):
        return tf.reduce_sum(v1.get_variable("v", [50], initializer=v1.random_normal_initializer()))

    servers = Servers(1, 2)
    models = [Model(servers, rule, k, 2, sgd, build, hook) for k in range(2)]
    for model in models:
        model.start()
    first, second = (model.values() for model in models)
    assert np.ptp(first["center"]["v"]) > 0
    for values in (first["local"], second["local"], second["center"]):
        np.testing.assert_array_equal(values["v"], first["center"]["v"])
    for model in models:
        for trio in model.trios:
            if trio.beside is not None:
                start = first["center"]["v"] if rule == "elastic" else np.zeros(50)
                np.testing.assert_array_equal(raw(model).run(trio.beside), start)


def raw(model):
    """The session in a monitored one."""
    if hasattr(model.session, "run_step_fn"):
        return model.session.run_step_fn(lambda step_context: step_context.session)
    return model.session


@rules
def test_local_step_is_on_its_worker(rule):
    """Though the optimizer is built where variables go to the ps."""
    servers = Servers(1, 2)
    models = [Model(servers, rule, k, 2, sgd, zeros([]), **{PERIODS[rule]: 10}) for k in range(2)]
    for model in models:
        model.start()
    for k in (0, 0, 0, 1):
        models[k].step()
    for k, steps in ((0, 3), (1, 1)):
        with models[k].graph.as_default():
            (step,) = [v for v in v1.local_variables() if v.op.name == "local_step"]
        assert step.device == f"/job:worker/task:{k}"
        assert not step.trainable
        assert models[k].session.run(step) == steps


def updates(model):
    """The operations that update a center, made of reference variables, after it was made."""
    centers = {trio.center.op.name for trio in model.trios}
    for op in model.graph.get_operations():
        update = op.type.startswith(("AssignAdd", "AssignSub", "Apply"))  # others initialise it
        if update and op.inputs[0].op.name in centers:
            yield op


@pytest.mark.parametrize("locking", [True, False])
@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_use_locking_reaches_every_update_of_the_center(rule, locking):
    model = Model(
        Servers(1, 1), rule, 0, 1, sgd, zeros([]), True, resource=False, use_locking=locking
    )
    assert [op.get_attr("use_locking") for op in updates(model)] == [locking] * 2  # op, hook


@ways
@kinds
@pytest.mark.parametrize("locking", [True, False])
@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_use_locking_is_a_lock_of_the_server(rule, locking, resource, hook):
    """While another has it an exchange waits; without it nobody does."""
    servers = Servers(1, 1)
    options = {"communication_period": 2, "use_locking": locking, "resource": resource}
    model = Model(servers, rule, 0, 1, sgd, zeros([]), hook, **options)
    model.start()
    for _ in range(2):
        model.step()  # and everything is where it has to be
    model.step()
    name = {"elastic": "ElasticAverageOptimizer", "agn": "AGNOptimizer"}[rule]
    with ThreadPoolExecutor(1) as pool:
        with held(servers, f"springline/{name}/turn_job:ps_task:0", "/job:ps/task:0"):
            exchange = pool.submit(model.step)
            done, _ = wait([exchange], 0.5 if locking else 50)
            assert bool(done) != locking
        exchange.result()
    assert model.values()["global_step"] == 2


@kinds
def test_an_exchange_sees_no_part_of_another(resource):
    """All variables of a server are read at once, and added to at once."""
    servers = Servers(1, 2)
    options = {"communication_period": 1, "moving_rate": 0.5, "rho": 0.0, "resource": resource}
    build = zeros([50_000], count=6)
    models = [Model(servers, "elastic", k, 2, sgd, build, True, **options) for k in range(2)]
    for model in models:
        model.start()
    for _ in range(20):
        together(models, [None, None])
        for model in models:
            copies = np.stack(raw(model).run([trio.beside for trio in model.trios]))
            np.testing.assert_array_equal(copies, np.full_like(copies, copies[0, 0]))


@kinds
@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_no_update_is_lost(rule, resource):
    """Under the lock, whatever two workers do at once."""
    servers = Servers(1, 2)
    options = {"moving_rate": 0.5, "rho": 0.0} if rule == "elastic" else {}
    models = [
        Model(
            servers,
            rule,
            k,
            2,
            lambda: v1.train.MomentumOptimizer(1.0, 0.5) if rule == "agn" else sgd(),
            zeros([100_000]),
            resource=resource,
            communication_period=1,
            **options,
        )
        for k in range(2)
    ]
    for model in models:
        model.start()
    for _ in range(20):
        together(models, [None, None])
    values = [model.values() for model in models]
    assert values[0]["global_step"] == 40
    center = values[0]["center"]["v0"]
    if rule == "elastic":  # an exchange conserves x + c
        total = center + values[0]["local"]["v0"] + values[1]["local"]["v0"]
        close(total, np.full(100_000, 40.0), 1e-5)
    else:  # a chain of 40 steps with momentum
        m = c = 0.0
        for _ in range(40):
            m = 0.5 * m + 1
            c += m
        close(center, np.full(100_000, c), 1e-5)


@rules
@kinds
def test_one_center_whatever_the_reuse(rule, resource):
    with tf.Graph().as_default():
        getter = GETTERS[rule]("")
        for reuse in (None, True, v1.AUTO_REUSE):
            with v1.variable_scope("net", custom_getter=getter, reuse=reuse, use_resource=resource):
                v = v1.get_variable("v", [2])
        assert [t.local.name for t in getter.trios()] == [v.name]
        assert [c.name for c in v1.global_variables()] == ["global_center_variable/net/v:0"]
        loss = tf.reduce_sum(v * v)
        opt = wrap(rule, sgd(), 1, getter)
        opt.minimize(loss, v1.train.get_or_create_global_step())
