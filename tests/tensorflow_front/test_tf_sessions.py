"""What a session that TensorFlow starts finds on the servers: a whole center, a part, none."""

import pytest
import tensorflow as tf
from test_tf_start import bowl, raw, sgd, start_in_time, with_statistics
from tf_cluster import GETTERS, PERIODS, Model, Servers, close, hook_of, wrap

v1 = tf.compat.v1
train = v1.train
hooks = pytest.mark.parametrize("hook", [True, False], ids=["hook", "no hook"])


def model_of(servers, hook, build=bowl, worker=0):
    options = {PERIODS["elastic"]: 1, "rho": 0.0}
    return Model(servers, "elastic", worker, 1, sgd, build, hook, **options)


def begin(model, **options):
    start_in_time(model, True, hooks=model.hooked, **options)
    if not model.hooked:
        raw(model.session).run(model.init)
    return model


@hooks
def test_a_chief_that_was_killed_while_it_initialised(hook):
    """Of all variables on the servers only the centers are there."""
    servers = Servers(1, 1)
    model = model_of(servers, hook, with_statistics)
    with servers.session(0, model.graph) as session:
        session.run([trio.center.initializer for trio in model.trios])
    begin(model).step()
    assert model.values()["global_step"] == 1


@hooks
def test_a_session_that_evaluates_comes_first(hook):
    """Its graph has a getter and no optimizer: it makes the center, and nothing else."""
    servers = Servers(1, 2)
    device = "/job:worker/task:1"
    setter = train.replica_device_setter(worker_device=device, cluster=servers.spec)
    with tf.Graph().as_default(), v1.device(setter):
        getter = GETTERS["elastic"](device)
        with v1.variable_scope("", custom_getter=getter, use_resource=True):
            v1.get_variable("v", [3], initializer=v1.ones_initializer())
        config = v1.ConfigProto(device_filters=["/job:ps", device])
        target = servers.servers["worker", 1].target
        with train.MonitoredTrainingSession(target, config=config) as session:
            close(session.run(getter.trios()[0].center), [1.0] * 3)
    model = begin(model_of(servers, hook))
    model.step()
    assert model.values()["global_step"] == 1


def test_an_init_fn_that_failed_runs_again():
    """The center was initialised by then; the next chief trained from random values."""
    servers, calls = Servers(1, 1), []

    def chief():
        model = model_of(servers, True)
        with model.graph.as_default():
            far = v1.assign(model.trios[0].center, [9.0] * 3).op

        def load(_, session):
            calls.append(1)
            if len(calls) == 1:
                raise OSError("no such file yet")
            session.run(far)

        with model.graph.as_default():
            return begin(model, scaffold=train.Scaffold(init_fn=load))

    with pytest.raises(OSError, match="no such file yet"):
        chief()
    close(chief().values()["center"]["v"], [9.0] * 3)


@hooks
def test_a_center_on_the_workers_own_device_goes_on(hook, tmp_path):
    """Without servers: it lives as long as the worker's, from one session to the next."""
    server, began = tf.distribute.Server.create_local_server(), []
    for _ in range(2):
        with tf.Graph().as_default():
            getter, step = GETTERS["elastic"](""), train.get_or_create_global_step()
            with v1.variable_scope("", custom_getter=getter, use_resource=True):
                v = v1.get_variable("v", [2], initializer=v1.random_normal_initializer())
            opt = wrap("elastic", sgd(), 1, getter, communication_period=1, rho=0.0)
            minimize = opt.minimize(tf.reduce_sum(tf.square(v)), step)
            given = [hook_of("elastic", opt)] if hook else []
            folder = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 1}
            with train.MonitoredTrainingSession(server.target, hooks=given, **folder) as session:
                began.append(raw(session).run(step))
                for _ in range(3):
                    session.run(minimize)
    assert began == [0, 3]


def test_a_variable_that_is_used_again_adds_nothing():
    with tf.Graph().as_default() as graph:
        getter = GETTERS["elastic"]("")
        with v1.variable_scope("m", custom_getter=getter, use_resource=True):
            v1.get_variable("v", [2])
        before = len(graph.get_operations())
        with v1.variable_scope("m", custom_getter=getter, use_resource=True, reuse=True):
            v1.get_variable("v", [2])
        assert len(graph.get_operations()) == before


def test_a_graph_that_was_saved_joins(tmp_path):
    servers = Servers(1, 1)
    model = begin(model_of(servers, True))
    with model.graph.as_default():
        v1.train.export_meta_graph(str(tmp_path / "graph.meta"))
    center = model.values()["center"]["v"]
    config = v1.ConfigProto(device_filters=["/job:ps", "/job:worker/task:0"])
    with tf.Graph().as_default():
        train.import_meta_graph(str(tmp_path / "graph.meta"))
        target = servers.servers["worker", 0].target
        with train.MonitoredTrainingSession(target, config=config) as session:
            name = model.trios[0].center.op.name
            close(session.run(f"{name}/Read/ReadVariableOp:0"), center)
