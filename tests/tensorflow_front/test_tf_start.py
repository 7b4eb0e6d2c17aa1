"""How a session starts: what it initialises, what it waits for, and whose center it joins."""

import threading

import pytest
import tensorflow as tf
from tf_cluster import GETTERS, INNERS, PERIODS, Model, Servers, close, hook_of, wrap

from marks import slow
from springline.tensorflow import start

v1 = tf.compat.v1
train = v1.train
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])

rules = pytest.mark.parametrize("rule", GETTERS)
one_rule = pytest.mark.parametrize("rule", ["elastic", *slow("average", "agn")])


def sgd():
    return INNERS["sgd"](0.1)


def bowl(model):
    v = v1.get_variable("v", [3], initializer=v1.random_normal_initializer())
    model.v = v
    return tf.reduce_sum(tf.square(v))


def averaged(model):
    """A moving average of the worker's variable, on the worker's own device."""
    loss = bowl(model)
    with v1.device(model.getter.worker_device):
        average = train.ExponentialMovingAverage(0.5)
        model.update, model.average = average.apply([model.v]), average.average(model.v)
    assert "job:worker" in model.average.device
    return loss


def session_of(model, chief, more=(), hooks=True, **options):
    """A session that is told, or not, whether it is chief; the hook may know otherwise."""
    server = model.servers.servers["worker", model.worker]
    filters = ["/job:ps", f"/job:worker/task:{model.worker}"]
    with model.graph.as_default():
        return train.MonitoredTrainingSession(
            server.target,
            is_chief=chief,
            hooks=[model.hook, *more] if hooks else [],
            config=v1.ConfigProto(device_filters=filters),
            log_step_count_steps=None,
            save_summaries_steps=None,
            save_summaries_secs=None,
            **options,
        )


def raw(session):
    return session.run_step_fn(lambda step_context: step_context.session)


def start_in_time(model, chief=False, **options):
    """Start, in a thread that may be left behind; give what it raises."""
    raised = []

    def start():
        try:
            model.session = session_of(model, chief, **options)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits"
    for error in raised:
        raise error


@kinds
@rules
@pytest.mark.parametrize("saved", [False, True], ids=["", "with a checkpoint"])
def test_a_moving_average_on_the_worker(rule, resource, saved, tmp_path):
    """It starts from the center, as the worker does."""
    servers = Servers(1, 2)
    options = {"resource": resource, PERIODS[rule]: 100}
    folder = str(tmp_path) if saved else None
    for k in range(2):
        model = Model(servers, rule, k, 2, sgd, averaged, True, **options)
        start_in_time(model, k == 0, checkpoint_dir=folder)
        center = model.values()["center"]["v"]
        close(raw(model.session).run(model.average), center)
        model.step()
        raw(model.session).run(model.update)
        x = model.values()["local"]["v"]
        close(raw(model.session).run(model.average), (center + x) / 2)


@kinds
@rules
def test_a_moving_average_of_a_second_model(rule, resource):
    """A generator beside its critic, each with a getter: the first hook sets both to the center."""
    servers = Servers(1, 2)
    options = {PERIODS[rule]: 100}
    for k in range(2):
        first = Model(servers, rule, k, 2, sgd, bowl, True, resource, **options)
        device = first.getter.worker_device
        setter = train.replica_device_setter(worker_device=device, cluster=servers.spec)
        with first.graph.as_default(), v1.device(setter):
            getter = GETTERS[rule](device)
            with v1.variable_scope("second", custom_getter=getter, use_resource=resource):
                w = v1.get_variable("w", [3], initializer=v1.random_normal_initializer())
            opt = wrap(rule, sgd(), 2, getter, k, **options)
            opt.minimize(tf.reduce_sum(tf.square(w)), first.global_step)
            average = train.ExponentialMovingAverage(0.5)
            average.apply([w])
            first.session = session_of(first, k == 0, [hook_of(rule, opt, k)])
            center, moving = getter.trio(w).center, average.average(w)
        close(*first.session.run([moving, center]))


@kinds
@rules
def test_a_saver_of_the_scripts_own_finds_the_workers_variables(rule, resource, tmp_path):
    """TensorFlow saves before the hook's turn, and a moving average starts from the center."""
    model = Model(Servers(1, 1), rule, 0, 1, sgd, averaged, True, resource=resource)
    with model.graph.as_default():
        scaffold = train.Scaffold(saver=train.Saver())
    model.session = session_of(model, True, checkpoint_dir=str(tmp_path), scaffold=scaffold)
    saved = tf.train.load_variable(str(tmp_path), model.average.op.name)
    close(model.values()["center"]["v"], saved)


@rules
def test_a_dynamic_loss_scale_made_on_the_worker(rule):
    """With resource variables: it has a `tf.cond`, which takes no others."""
    servers = Servers(1, 2)
    options = {PERIODS[rule]: 9} | ({"rho": 0.0} if rule == "elastic" else {})

    def scaled(k):
        with v1.device(f"/job:worker/task:{k}"):
            return v1.mixed_precision.MixedPrecisionLossScaleOptimizer(sgd(), "dynamic")

    for k in range(2):
        model = Model(servers, rule, k, 2, lambda k=k: scaled(k), bowl, True, **options)
        start_in_time(model, k == 0)
        model.step()


@rules
@pytest.mark.parametrize("k", [0, 1], ids=["chief", "other"])
def test_a_global_step_on_the_worker_is_refused(rule, k):
    with tf.Graph().as_default():
        device = f"/job:worker/task:{k}"
        setter = train.replica_device_setter(worker_device=device, ps_tasks=1)
        with v1.device(device):
            step = train.get_or_create_global_step()
        getter = GETTERS[rule](device)
        with v1.device(setter), v1.variable_scope("", custom_getter=getter):
            v = v1.get_variable("v", [], initializer=v1.ones_initializer())
        opt = wrap(rule, sgd(), 2, getter, k)
        with pytest.raises(
            ValueError, match=r"'global_step:0' is on .*task:\d.*replica_device_setter"
        ):
            opt.minimize(tf.square(v), step)


@kinds
@rules
def test_a_variable_that_the_chief_does_not_have_is_named(rule, resource, monkeypatch):
    monkeypatch.setattr(start, "PATIENCE", 0.5)
    servers = Servers(1, 2)

    def more(model):
        v1.get_variable("nobodys", [], trainable=False)
        return bowl(model)

    chief = Model(servers, rule, 0, 2, sgd, bowl, True, resource=resource)
    chief.start()
    other = Model(servers, rule, 1, 2, sgd, more, True, resource=resource)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"nobodys"):
        start_in_time(other)


def test_a_worker_that_waits_for_the_chief_says_so(monkeypatch, capfd):
    monkeypatch.setattr(start, "PATIENCE", 0.5)
    model = Model(Servers(1, 2), "elastic", 1, 2, sgd, bowl, True)
    # One that waited on would set its variables later, in the middle of another test.
    with pytest.raises(tf.errors.DeadlineExceededError):
        start_in_time(model, max_wait_secs=1)
    assert "global_center_variable/v" in capfd.readouterr().err


@kinds
@rules
@pytest.mark.parametrize("saved", [False, True], ids=["", "with a checkpoint"])
def test_a_session_that_is_chief_by_default_joins(rule, resource, saved, tmp_path):
    """0.05 became 10.0, the value that the center began with."""
    servers = Servers(1, 2)
    folder = str(tmp_path) if saved else None
    options = {"resource": resource, PERIODS[rule]: 1}
    first = Model(servers, rule, 0, 1, sgd, bowl, True, **options)
    first.session = session_of(first, True, checkpoint_dir=folder)
    for _ in range(3):
        first.step()
    before = first.values()
    second = Model(servers, rule, 1, 1, sgd, bowl, True, **options)
    second.session = session_of(second, True, checkpoint_dir=folder)
    found = second.values()
    assert found["global_step"] == before["global_step"] == 3
    tf.nest.map_structure(close, found["center"], before["center"])
    tf.nest.map_structure(close, found["local"], before["center"])


@kinds
@rules
@pytest.mark.parametrize("monitored", [True, False], ids=["monitored", "plain"])
def test_a_session_without_the_hook_joins(rule, resource, monitored):
    """One that is chief by default, or a script that initialises all it has in every worker."""
    servers = Servers(1, 2)
    options = {"resource": resource, PERIODS[rule]: 1}
    options |= {"rho": 0.0} if rule == "elastic" else {}
    adam = INNERS["adam"]
    first = Model(servers, rule, 0, 1, lambda: adam(0.1), bowl, **options)
    first.start()
    for _ in range(3):
        first.step()
    before = first.values()
    shared = first.opt.outer.variables() if first.opt.outer else []
    state = first.session.run(shared)
    second = Model(servers, rule, 1, 1, lambda: adam(0.1), bowl, **options)
    if monitored:
        with second.graph.as_default():
            second.session = train.MonitoredTrainingSession(
                servers.servers["worker", 1].target,
                config=v1.ConfigProto(device_filters=["/job:ps", "/job:worker/task:1"]),
            )
        raw(second.session).run(second.init)
    else:
        second.session = servers.session(1, second.graph)
        second.session.run([second.globals, second.locals])
        second.session.run(second.init)
    found = second.values()
    assert found["global_step"] == before["global_step"] == 3
    tf.nest.map_structure(close, found["center"], before["center"])
    tf.nest.map_structure(close, found["local"], before["center"])
    tf.nest.map_structure(close, first.session.run(shared), state)
    second.step()
    assert second.values()["global_step"] == 4


def with_statistics(model):
    """A variable on the servers that is nobody's parameter, as those of BatchNorm; one on its own.

    A `Saver` of the script's own saves both.
    """
    loss = bowl(model)
    with v1.device(model.getter.worker_device):
        model.scale = v1.get_variable("scale", initializer=8.0, trainable=False)
    model.moving = v1.get_variable(
        "moving", [], initializer=v1.zeros_initializer(), trainable=False
    )
    model.move = v1.assign_add(model.moving, 1.0)
    assert "job:ps" in model.moving.device
    return loss


def far_away(model):
    """What an `init_fn` may load: it is for a new center."""
    center = model.trios[0].center
    far = v1.assign(center, [9.0] * 3).op
    return {"init_fn": lambda scaffold, session: session.run(far)}


SCAFFOLDS = {
    "saver": lambda model: {"saver": train.Saver()},
    "init_op": lambda model: {"init_op": v1.global_variables_initializer()},
    "init_fn": far_away,
    "nothing": lambda model: {},
}


@kinds
@one_rule
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "no hook"])
@pytest.mark.parametrize("given", SCAFFOLDS)
def test_what_a_scaffold_is_given_leaves_a_living_center_alone(
    rule, resource, hook, given, tmp_path
):
    """A chief came back with its own `Saver`: the center that others train was as it saved it."""
    servers = Servers(1, 2)
    options = {"resource": resource, PERIODS[rule]: 1}
    options |= {"rho": 0.0} if rule == "elastic" else {}
    folder = None if given.startswith("init") else str(tmp_path)

    def chief(worker):
        model = Model(servers, rule, worker, 1, sgd, with_statistics, hook, **options)
        with model.graph.as_default():
            scaffold = train.Scaffold(**SCAFFOLDS[given](model))
        start_in_time(model, True, checkpoint_dir=folder, scaffold=scaffold, hooks=hook)
        if not hook:
            raw(model.session).run(model.init)
        return model

    first = chief(0)  # it saves its first step only
    if given == "init_fn":
        close(first.values()["center"]["v"], [9.0] * 3)
    for _ in range(3):
        first.step()
    raw(first.session).run(first.move)
    before = first.values()
    second = chief(1)
    found = second.values()
    assert found["global_step"] == before["global_step"] == 3
    tf.nest.map_structure(close, found["center"], before["center"])
    tf.nest.map_structure(close, found["local"], before["center"])
    assert raw(second.session).run([second.moving, second.scale]) == [1, 8]


@rules
def test_what_an_init_fn_loads_for_nothing_is_refused(rule):
    """The session sets the worker's variables to the center: it trained from random ones."""
    model = Model(Servers(1, 1), rule, 0, 1, sgd, bowl, True, **{PERIODS[rule]: 1})
    with model.graph.as_default():
        load = v1.assign(model.v, [9.0] * 3).op
        scaffold = train.Scaffold(init_fn=lambda scaffold, session: session.run(load))
    with pytest.raises(RuntimeError, match=r"has loaded 'v:0'.*swapping_saver"):
        start_in_time(model, True, scaffold=scaffold)


@kinds
@rules
def test_a_new_center_is_restored_with_a_saver_of_the_scripts_own(rule, resource, tmp_path):
    options = {"resource": resource, PERIODS[rule]: 1}
    saved = []
    for _ in range(2):
        model = Model(Servers(1, 1), rule, 0, 1, sgd, bowl, True, **options)
        with model.graph.as_default():
            scaffold = train.Scaffold(saver=train.Saver())
        folder = str(tmp_path)
        start_in_time(
            model, True, checkpoint_dir=folder, scaffold=scaffold, save_checkpoint_steps=1
        )
        with model.graph.as_default():
            saved.append(model.values()["global_step"])
            for _ in range(3):
                model.step()
            model.session.close()
    assert saved == [0, 3]


@rules
def test_a_variable_on_a_workers_own_device_without_the_hook(rule):
    """TensorFlow waits for the chief to initialise it, which cannot, and says nothing."""
    servers = Servers(1, 2)
    Model(servers, rule, 0, 2, sgd, bowl, **{PERIODS[rule]: 100}).start()

    def scaled(model):
        with v1.device(model.getter.worker_device):
            model.scale = v1.get_variable("scale", initializer=8.0, trainable=False)
        return bowl(model)

    model = Model(servers, rule, 1, 2, sgd, scaled, **{PERIODS[rule]: 100})
    start_in_time(model, hooks=False)
    assert raw(model.session).run(model.scale) == 8
    for chief in (False, True):
        model = Model(servers, rule, 1, 2, sgd, averaged, **{PERIODS[rule]: 100})
        with pytest.raises(RuntimeError, match=r"ExponentialMovingAverage.*make_session_run_hook"):
            start_in_time(model, chief, hooks=False)


@rules
def test_the_first_session_makes_the_center_whatever_the_hook_was_told(rule):
    model = Model(Servers(1, 2), rule, 1, 1, sgd, bowl, True, **{PERIODS[rule]: 1})
    start_in_time(model, chief=True)
    model.step()
    assert model.values()["global_step"] == 1


def test_a_restarted_chief_starts_its_own_averages_from_the_center(tmp_path):
    """Its checkpoint is not restored into the living center, and nobody else has them."""
    servers = Servers(1, 2)

    def chief():
        model = Model(servers, "elastic", 0, 2, sgd, averaged, True, communication_period=1)
        model.session = session_of(model, True, checkpoint_dir=str(tmp_path))
        return model

    first = chief()
    first.step()
    center = first.values()["center"]["v"]
    with first.graph.as_default():
        first.session.close()
    with tf.Graph().as_default() as graph:  # as if the process were a new one
        with v1.device("/job:worker/task:0"):
            average = v1.get_variable(first.average.op.name, [3], trainable=False)
            forget = tf.raw_ops.DestroyResourceOp(resource=average.handle)
        with servers.session(0, graph) as session:
            session.run(forget)
    second = chief()
    close(second.values()["center"]["v"], center)
    close(second.session.run(second.average), center)


@kinds
@rules
@pytest.mark.parametrize("way", ["no step", "initialiser first", "of some only"])
def test_whatever_initialises_leaves_a_center_alone(rule, resource, way):
    """A script that evaluates, one that makes its initialiser early, one that trains a part."""
    servers = Servers(1, 2)

    def two(model):
        model.u = v1.get_variable("u", [3], initializer=v1.ones_initializer())
        return bowl(model) + tf.reduce_sum(tf.square(model.u))

    options = {PERIODS[rule]: 1, **({"rho": 0.0} if rule == "elastic" else {})}
    first = Model(servers, rule, 0, 1, sgd, two, resource=resource, **options)
    first.start()
    for _ in range(3):
        first.step()
    before = first.values()

    device = "/job:worker/task:1"
    setter = train.replica_device_setter(
        worker_device=device, ps_device="/job:ps", cluster=servers.spec
    )
    with tf.Graph().as_default() as graph, v1.device(setter):
        getter, step = GETTERS[rule](device), train.get_or_create_global_step()
        with v1.variable_scope("", custom_getter=getter, use_resource=resource):
            u = v1.get_variable("u", [3], initializer=v1.ones_initializer())
            v = v1.get_variable("v", [3], initializer=v1.ones_initializer())
        init = v1.global_variables_initializer()
        opt = wrap(rule, sgd(), 1, getter, 1, **options)
        if way == "no step":
            opt.swapping_saver()
        else:
            opt.minimize(tf.reduce_sum(u + v), step, var_list=[v] if "some" in way else None)
        if way != "initialiser first":
            init = v1.global_variables_initializer()
        with servers.session(1, graph) as session:
            session.run(init)
    after = first.values()
    assert after["global_step"] == before["global_step"] == 3
    for name, c in before["center"].items():
        close(c, after["center"][name], 0)


@rules
def test_sessions_one_after_another_in_one_graph(rule):
    model = Model(Servers(1, 1), rule, 0, 1, sgd, bowl, True, **{PERIODS[rule]: 2})
    for k in (1, 2):
        model.start()
        for _ in range(4):
            model.step()
        assert model.values()["global_step"] == 2 * k
        model.session.close()
