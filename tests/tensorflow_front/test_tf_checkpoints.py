"""Old checkpoints, checkpoints of ours, and centers that live on."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, INNERS, PERIODS, Model, Servers, close, hook_of, wrap

from marks import slow
from recorded import DATA, FIXTURES, gradient, start

v1 = tf.compat.v1
OLD = FIXTURES / "checkpoints"
VALUES = json.loads((OLD / "values.json").read_text())
rules = pytest.mark.parametrize("rule", GETTERS)
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])


def build(model):
    """The model of the recorded runs, from other values."""
    w = v1.get_variable("w", [3, 2], initializer=v1.random_normal_initializer())
    b = v1.get_variable("b", [2], initializer=v1.random_normal_initializer())
    model.x = v1.placeholder(tf.float32, [4, 3])
    model.y = v1.placeholder(tf.float32, [4, 2])
    return tf.reduce_mean(tf.square(tf.matmul(model.x, w) + b - model.y))


def made(servers, rule, inner="sgd", resource=True, rate=0.1):
    options = {"moving_rate": 0.5, "rho": 0.0} if rule == "elastic" else {}
    options[PERIODS[rule]] = 2
    return Model(
        servers, rule, 0, 1, lambda: INNERS[inner](rate), build, True, resource=resource, **options
    )


def begin(model, directory=None, *more):
    """A chief's session, which saves when it starts and when it ends."""
    with model.graph.as_default():
        model.session = v1.train.MonitoredTrainingSession(
            model.servers.servers["worker", 0].target,
            checkpoint_dir=directory and str(directory),
            hooks=[model.hook, *more],
            save_checkpoint_steps=1000,
            save_summaries_steps=None,
            save_summaries_secs=None,
            log_step_count_steps=None,
        )
    return model


def end(model):
    """End a session, which saves."""
    with model.graph.as_default():
        model.session.close()


def feed(model, t):
    return {model.x: DATA[0][0][t], model.y: DATA[0][1][t]}


def same(values, expected):
    for key in ("w", "b"):
        close(values[key], expected[key])


def gone_on(rule, c):
    """x and c after two more steps, which end with an exchange."""
    x, a = dict(c), {"w": 0, "b": 0}
    for t in (6, 7):
        g = gradient(0, t, x)
        x = {key: x[key] - 0.1 * g[key] for key in x}
        a = {key: a[key] + g[key] for key in x}
    if rule == "average":
        return x, x
    if rule == "agn":
        c = {key: c[key] - 0.1 * a[key] / 2 for key in c}
        return c, c
    return ({key: (x[key] + c[key]) / 2 for key in c},) * 2


@kinds
@rules
def test_old_checkpoint_goes_on(rule, resource, tmp_path):
    directory = shutil.copytree(OLD / rule, tmp_path / "old")
    model = begin(made(Servers(1, 1), rule, resource=resource), directory)
    old = {key: np.array(VALUES[rule][key], np.float32) for key in ("w", "b")}
    values = model.values()
    same(values["center"], old)
    same(values["local"], old)
    assert values["global_step"] == VALUES[rule]["global_step"] == 3
    for t in (6, 7):
        model.step(feed(model, t))
    x, c = gone_on(rule, old)
    values = model.values()
    same(values["local"], x)
    same(values["center"], c)
    assert values["global_step"] == 4
    end(model)
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(directory)))
    same({key: saved.get_tensor(f"global_center_variable/{key}") for key in c}, c)
    assert saved.get_tensor("global_step") == 4


def plain(directory, resource=True):
    """Restore the newest checkpoint in a model that knows nothing of springline."""
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=resource):
        model = {key: v1.get_variable(key, value.shape) for key, value in start().items()}
        saver = v1.train.Saver()
        with v1.Session() as session:
            saver.restore(session, tf.train.latest_checkpoint(str(directory)))
            return session.run(model)


@kinds
def test_old_swapped_checkpoint_in_a_plain_model(resource):
    same(plain(OLD / "elastic-swapped", resource), VALUES["elastic"])


@rules
def test_old_swapped_checkpoint_becomes_the_center(rule):
    model = made(Servers(1, 1), rule)
    with model.graph.as_default():
        saver = model.opt.swapping_saver()
    begin(model)
    with model.graph.as_default():
        saver.restore(model.session, str(OLD / "elastic-swapped" / "model"))
    same(model.values()["center"], VALUES["elastic"])


@kinds
@rules
def test_our_swapped_checkpoint_in_a_plain_model(rule, resource, tmp_path):
    model = made(Servers(2, 1), rule, "momentum", resource)
    with model.graph.as_default():
        saver = model.opt.swapping_saver(name="mine", max_to_keep=1)
        chosen = model.opt.swapping_saver({"weights": model.trios[0].local})
    begin(model)
    for t in range(3):  # the third is not exchanged: x is elsewhere
        model.step(feed(model, t))
    before = model.values()
    with model.graph.as_default():
        saver.save(model.session, str(tmp_path / "all" / "model"), global_step=2)
        chosen.save(model.session, str(tmp_path / "chosen" / "model"))
    same(plain(tmp_path / "all"), before["center"])
    saved = tf.train.load_checkpoint(str(tmp_path / "chosen"))
    assert list(saved.get_variable_to_shape_map()) == ["weights"]
    close(saved.get_tensor("weights"), before["center"]["w"])
    assert np.abs(before["local"]["w"] - before["center"]["w"]).max() > 1e-4
    after = model.values()  # nothing was swapped
    same(after["local"], before["local"])
    same(after["center"], before["center"])


@rules
def test_swapped_checkpoint_of_slices(rule, tmp_path):
    def sliced(model):
        part = v1.fixed_size_partitioner(2)
        w = v1.get_variable("w", [3, 2], partitioner=part)
        b = v1.get_variable("b", [2])
        model.both = [w, b]
        return tf.reduce_sum(tf.matmul(tf.ones([1, 3]), tf.convert_to_tensor(w)) * b)

    model = Model(Servers(2, 1), rule, 0, 1, lambda: INNERS["sgd"](0.1), sliced, True)
    with model.graph.as_default():
        w, b = model.both
        lists = [None, [w, b], {"w": w, "b": b}, [*w, b]]  # as TensorFlow's own savers take them
        savers = [model.opt.swapping_saver(given) for given in lists]
    begin(model)
    model.step()
    center = model.values()["center"]
    for k, saver in enumerate(savers):
        with model.graph.as_default():
            saver.save(model.session, str(tmp_path / f"{k}" / "model"))
        restored = plain(tmp_path / f"{k}")
        close(restored["w"], np.concatenate([center["w/part_0"], center["w/part_1"]]))
        close(restored["b"], center["b"])


@kinds
@pytest.mark.parametrize("has", ["nothing", "moments"])
def test_old_checkpoint_of_agn_with_adam(has, resource, tmp_path, caplog):
    """It lacks some state of the center's optimizer, which starts from its initial values."""
    old = {"global_step": np.int64(3)}
    for name in ("w", "b"):
        old[f"global_center_variable/{name}"] = np.array(VALUES["agn"][name], np.float32)
        for moment in ("Adam", "Adam_1"):
            if has == "moments":
                shape = old[f"global_center_variable/{name}"].shape
                old[f"global_center_variable/{name}/{moment}"] = np.full(shape, 5, np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.Saver({name: v1.Variable(value) for name, value in old.items()})
        session.run(v1.global_variables_initializer())
        saver.save(session, str(tmp_path / "model.ckpt"), global_step=3, write_meta_graph=False)

    model = begin(made(Servers(2, 1), "agn", "adam", resource), tmp_path)
    values = model.values()
    same(values["center"], VALUES["agn"])
    same(values["local"], VALUES["agn"])
    assert values["global_step"] == 3
    (line,) = [
        r.getMessage() for r in caplog.records if "starts from its initial" in r.getMessage()
    ]
    assert "decay1_power" in line
    raw = model.session.run_step_fn(lambda step_context: step_context.session)
    with model.graph.as_default():
        state = model.opt.outer.variables()
    assert len(state) == 8
    for v in state:
        first = {"decay1_power": 0.9, "decay2_power": 0.999}.get(v.op.name.rpartition("/")[2], 0.0)
        assert first or "Adam" in v.op.name
        close(raw.run(v), np.full(v.shape, first))
    for t in (6, 7):
        model.step(feed(model, t))
    assert model.values()["global_step"] == 4
    end(model)


@kinds
def test_old_checkpoint_of_two_agn_optimizers(resource, tmp_path, caplog):
    """As for a generator and its critic: the first hook restores for both."""
    old = {f"global_center_variable/{name}": np.ones(2, np.float32) for name in "uv"}
    old["global_step"] = np.int64(3)
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.Saver({name: v1.Variable(value) for name, value in old.items()})
        session.run(v1.global_variables_initializer())
        saver.save(session, str(tmp_path / "model.ckpt"), global_step=3, write_meta_graph=False)

    def two(model):
        model.u = v1.get_variable("u", [2], initializer=v1.zeros_initializer())
        return tf.reduce_sum(v1.get_variable("v", [2], initializer=v1.zeros_initializer()))

    adam = partial(INNERS["adam"], 0.1)
    model = Model(Servers(1, 1), "agn", 0, 1, adam, two, True, resource=resource)
    with model.graph.as_default():
        other = wrap("agn", adam(), 1, model.getter)
        other.minimize(tf.reduce_sum(model.u))
        hook = hook_of("agn", other)
    begin(model, tmp_path, hook)
    close(list(model.values()["center"].values()), np.ones([2, 2]))
    (said,) = [r.getMessage() for r in caplog.records if "starts from" in r.getMessage()]
    assert "variable/u/decay1_power" in said
    assert "variable/v/decay1_power" in said
    end(model)


@pytest.mark.parametrize("saved", [True, *slow(False)], ids=["saved", "unsaved"])
@rules
def test_restarted_chief_joins_a_living_center(rule, saved, tmp_path):
    servers, directory = Servers(1, 1), tmp_path if saved else None
    first = begin(made(servers, rule, "adam"), directory)  # saves the start, then dies
    for t in range(4):
        first.step(feed(first, t))
    living = first.values()
    assert living["global_step"] == 2
    second = begin(made(servers, rule, "adam"), directory)
    values = second.values()
    assert values["global_step"] == 2
    same(values["center"], living["center"])
    same(values["local"], living["center"])
    if saved:
        old = tf.train.load_checkpoint(str(tmp_path / "model.ckpt-0"))
        started = old.get_tensor("global_center_variable/w")
        assert np.abs(started - living["center"]["w"]).max() > 1e-3
    for t in range(2):
        second.step(feed(second, t))
    assert second.values()["global_step"] == 3


def constant(model):
    """A model whose gradients do not depend on where it is."""
    v = v1.get_variable("v", [2], initializer=v1.zeros_initializer())
    return [(tf.constant([1.0, -3.0]), v)]


@kinds
@pytest.mark.parametrize("inner", ["momentum", "adam"])
def test_state_of_the_center_goes_on_on_new_servers(inner, resource, tmp_path):
    """AGN's outer optimizer: as if nothing had happened."""

    def chief(directory):
        optimizer = partial(INNERS[inner], 0.1)
        options = {"resource": resource, "communication_period": 1}
        model = Model(Servers(2, 1), "agn", 0, 1, optimizer, constant, True, **options)
        return begin(model, directory)

    ends = []
    for stops in (True, False):
        model = chief(tmp_path / str(stops))
        for step in range(6):
            if stops and step == 3:
                end(model)
                model = chief(tmp_path / str(stops))
                assert model.values()["global_step"] == 3
            model.step()
        ends.append(model.values()["center"]["v"])
    close(*ends, 1e-6)
