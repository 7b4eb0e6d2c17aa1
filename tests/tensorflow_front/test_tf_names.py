"""What the center's state is called: by the model alone, so that checkpoints fit everywhere."""

import contextlib
import json
import shutil
from functools import partial

import pytest
import tensorflow as tf
from test_tf_checkpoints import begin, end, kinds, same
from tf_cluster import INNERS, Model, Servers, close

from recorded import FIXTURES

v1 = tf.compat.v1
OLD = FIXTURES.parent / "agn-adam"  # written when names depended on scopes, locks and servers
VALUES = json.loads((OLD / "values.json").read_text())
POWERS = {f"global_center_variable/m/{v}/decay{k}_power" for v in "wb" for k in (1, 2)}


def squares(model):
    """The model of the old checkpoints."""
    with v1.variable_scope("m"):
        w = v1.get_variable("w", [3, 2], initializer=v1.zeros_initializer())
        b = v1.get_variable("b", [2], initializer=v1.zeros_initializer())
    target = [[1.0, -2.0], [3.0, -4.0], [5.0, -6.0]]
    return tf.reduce_sum((w - target) ** 2) + tf.reduce_sum((b - [1.0, -3.0]) ** 2)


def made(servers, worker=0, workers=1, hook=True, **options):
    options = {"communication_period": 2, **options}
    return Model(
        servers, "agn", worker, workers, lambda: INNERS["adam"](0.1), squares, hook, **options
    )


@contextlib.contextmanager
def scoped():
    with v1.variable_scope("train"), v1.name_scope("tower"):
        yield


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "op"])
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_names_are_the_models(resource, hook):
    """Not those of a scope, a lock or a server."""

    def names(ps, **options):
        with made(Servers(ps, 1), hook=hook, resource=resource, **options).graph.as_default():
            return {v.op.name for v in v1.global_variables()}

    first = names(1)
    assert {name for name in first if "power" in name} == POWERS
    assert not [name for name in first if "beta" in name or "critical_section" in name]
    assert names(2) == first
    assert names(1, use_locking=False) == first
    assert names(1, scope=scoped) == first
    assert names(2, scope=scoped, use_locking=False) == first


@kinds
@pytest.mark.parametrize("locking", [True, False], ids=["with lock", "without"])
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("old", ["locked", "unlocked"])
def test_a_checkpoint_with_older_names_goes_on(old, ps, locking, resource, tmp_path, caplog):
    directory = shutil.copytree(OLD / old, tmp_path / "old")
    for saved in (VALUES["saved"], VALUES["two exchanges later"]):
        model = begin(made(Servers(ps, 1), resource=resource, use_locking=locking), directory)
        same({name[2:]: c for name, c in model.values()["center"].items()}, saved)
        assert "starts from its initial values" not in caplog.text
        for _ in range(4):
            model.step()
        end(model)
    written = tf.train.list_variables(tf.train.latest_checkpoint(str(directory)))
    assert {name for name, _ in written if "power" in name} == POWERS


@kinds
def test_a_worker_in_another_scope_joins(resource):
    """It would wait for variables that the chief never makes."""
    servers = Servers(2, 2)
    for worker, options in enumerate([{}, {"scope": scoped}]):
        model = made(servers, worker, 2, resource=resource, **options)
        model.start()
        for _ in range(2):
            model.step()
    assert model.values()["global_step"] == 2


@kinds
def test_a_checkpoint_goes_on_elsewhere(resource, tmp_path, caplog):
    """On more servers, in another scope, without the lock: as if nothing had changed."""
    ends = []
    for moves in (False, True):
        directory = tmp_path / str(moves)
        elsewhere = {"scope": scoped, "use_locking": False} if moves else {}
        for ps, options in ((1, {}), (2 if moves else 1, elsewhere)):
            model = begin(made(Servers(ps, 1), resource=resource, **options), directory)
            for _ in range(6):
                model.step()
            end(model)
        saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(directory)))
        ends.append({name: saved.get_tensor(name) for name in saved.get_variable_to_shape_map()})
    assert "starts from its initial values" not in caplog.text
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        close(value, ends[1][name], 1e-6)
    assert ends[0]["global_step"] == 6


@kinds
@pytest.mark.parametrize("inner", ["momentum", "adam"])
def test_a_slot_that_was_named_after_a_scope_goes_on(inner, resource, tmp_path, caplog):
    """An older version's, whose train operation was made in a variable scope."""

    def model():
        options = {"resource": resource, "communication_period": 2}
        kind = partial(INNERS[inner], 0.1)
        return Model(Servers(1, 1), "agn", 0, 1, kind, squares, True, **options)

    ends = []
    for renamed in (False, True):
        first = begin(model(), tmp_path / str(renamed))
        for _ in range(4):
            first.step()
        end(first)
        path = tf.train.latest_checkpoint(str(tmp_path / str(renamed)))
        if renamed:
            rename(path, lambda name: f"train/{name}" if is_slot(name) else name)
        second = begin(model(), tmp_path / str(renamed))
        for _ in range(4):
            second.step()
        ends.append(second.values()["center"])
        end(second)
    assert "starts from its initial values" not in caplog.text
    for name, c in ends[0].items():
        close(c, ends[1][name], 1e-6)


def is_slot(name):
    return name.count("/") == 3 and "power" not in name


def rename(path, new):
    """Write a checkpoint again, with other names in it."""
    saved = tf.train.load_checkpoint(path)
    values = {new(name): saved.get_tensor(name) for name in saved.get_variable_to_shape_map()}
    with tf.Graph().as_default(), v1.Session() as session:
        names, tensors = list(values), list(values.values())
        session.run(
            tf.raw_ops.SaveV2(
                prefix=path, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors
            )
        )
