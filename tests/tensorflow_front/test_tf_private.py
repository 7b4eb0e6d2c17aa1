"""TensorFlow's private attributes: each by its name, so that a failure says which it dropped."""

import ast
import re
from pathlib import Path

import pytest
import tensorflow as tf

import springline.tensorflow
from springline.tensorflow import private

v1 = tf.compat.v1
SOURCES = Path(springline.tensorflow.__file__).parent
MADE = {
    v1.train.GradientDescentOptimizer: (0.5,),
    v1.train.MomentumOptimizer: (0.5, 0.25),
    v1.train.AdagradOptimizer: (0.5, 0.25),
    v1.train.AdamOptimizer: (0.5, 0.25, 0.125, 2.0),
}


def kept(owner, attribute):
    assert hasattr(owner, attribute), f"TensorFlow dropped {type(owner).__name__}.{attribute}"
    return getattr(owner, attribute)


@pytest.mark.parametrize(
    ("kind", "k", "attribute"),
    [(kind, k, name) for kind, names in private.SETTINGS.items() for k, name in enumerate(names)],
)
def test_a_setting(kind, k, attribute):
    opt = kind(*MADE[kind])
    value = kept(opt, attribute)
    assert (value() if callable(value) else value) == MADE[kind][k]
    assert private.settings_of(opt) == list(MADE[kind])
    assert private.learning_rate_of(opt) == 0.5


def test_use_nesterov():
    opt = v1.train.MomentumOptimizer(0.5, 0.25, use_nesterov=True)
    assert kept(opt, "_use_nesterov") is True
    assert private.settings_of(opt) is None


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        (v1.train.RMSPropOptimizer, "_learning_rate"),
        (v1.train.FtrlOptimizer, "_learning_rate"),
        (v1.train.ProximalAdagradOptimizer, "_learning_rate"),
        (v1.train.ProximalGradientDescentOptimizer, "_learning_rate"),
        (v1.train.AdagradDAOptimizer, "_learning_rate"),
        (v1.train.AdadeltaOptimizer, "_lr"),
    ],
)
def test_a_learning_rate(kind, attribute):
    step = [tf.Variable(0, dtype=tf.int64)] if kind is v1.train.AdagradDAOptimizer else []
    opt = kind(0.5, *step)
    value = kept(opt, attribute)
    assert (value() if callable(value) else value) == 0.5
    assert private.learning_rate_of(opt) == 0.5
    assert private.settings_of(opt) is None


@pytest.mark.parametrize("kind", MADE)
def test_prepare(kind):
    """What `apply_gradients` calls to make tensors of the settings, such as a rate."""
    calls = []

    def rate():
        calls.append(1)
        return 0.5

    with tf.Graph().as_default():
        opt = kind(rate, *MADE[kind][1:])
        kept(opt, "_prepare")
        private.prepare_once(opt)
        assert calls == [1]
        opt.apply_gradients([(tf.constant(1.0), v1.get_variable("v", []))])
        assert calls == [1]


def test_create_or_restore_slot_variable():
    """`tf.train.Checkpoint` calls it; that it does, test_tf_eager_state.py shows."""
    kept(v1.train.GradientDescentOptimizer(0.5), "_create_or_restore_slot_variable")


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_initializer_op(resource):
    with tf.Graph().as_default(), v1.Session() as session:
        v = v1.get_variable("v", [], initializer=v1.ones_initializer(), use_resource=resource)
        assert kept(v, "_initializer_op") is v.initializer
        private.replace_initializer(v, v1.assign(v, 7.0).op)
        session.run(v1.global_variables_initializer())
        assert session.run(v) == 7


def test_get_control_flow_context():
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            kept(graph, "_get_control_flow_context")
            seen = [private.inside_old_control_flow(graph)]

            def branch():
                seen.append(private.inside_old_control_flow(graph))
                return tf.constant(0)

            tf.cond(v1.placeholder(tf.bool, []), branch, branch)
    finally:
        v1.enable_control_flow_v2()
    assert seen == [False, True, True]


def test_graph_and_ready_for_local_init_op():
    with tf.Graph().as_default() as graph:
        ready = v1.report_uninitialized_variables()
        manager = v1.train.SessionManager(tf.no_op(), ready_for_local_init_op=ready)
    assert kept(manager, "_graph") is graph is private.graph_of(manager)
    assert kept(manager, "_ready_for_local_init_op") is ready is private.readiness_of(manager)


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_save_slice_info(resource):
    with tf.Graph().as_default(), v1.variable_scope("m", use_resource=resource):
        parts = list(v1.get_variable("w", [4], partitioner=v1.fixed_size_partitioner(2)))
        plain = v1.get_variable("v", [4])
    for part in parts:
        assert kept(kept(part, "_save_slice_info"), "full_name") == "m/w"
    assert [private.whole_name(v) for v in [*parts, plain]] == ["m/w", "m/w", None]


def private_names(tree):
    """What is read (`x._name`, `getattr(x, "_name")`), and what is made, of such names."""
    read, made = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (made if isinstance(node.ctx, ast.Store) else read).add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            made.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            made |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            read |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return [{n for n in names if re.match("_[a-z]", str(n))} for names in (read, made)]


def test_no_other_file_uses_any():
    """Of what begins with "_" a file may only read what springline itself has made."""
    files = {path.name: ast.parse(path.read_text()) for path in SOURCES.glob("*.py")}
    names = {file: private_names(tree) for file, tree in files.items()}
    own = {name for _, made in names.values() for name in made} | {"_exit"}  # of `os`
    theirs = {file: read - own for file, (read, _) in names.items() if read - own}
    found = {"_get_control_flow_context", "_graph", "_learning_rate", "_lr"}
    found |= {"_ready_for_local_init_op", "_save_slice_info", "_use_nesterov"}
    assert theirs == {"private.py": found}
