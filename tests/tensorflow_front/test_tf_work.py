"""What a step does and what not: no talk with servers, no penalty of nothing; under the hook."""

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, PERIODS, Model, Servers, wrap

v1 = tf.compat.v1
rules = pytest.mark.parametrize("rule", GETTERS)


def sgd():
    return v1.train.GradientDescentOptimizer(1.0)


def zeros(shape, count=1):
    """Variables of zeros and their gradients."""

    def build(model):
        made = [
            v1.get_variable(f"v{k}", shape, initializer=v1.zeros_initializer())
            for k in range(count)
        ]
        return [(-tf.ones(v.shape), v) for v in made]

    return build


def devices_of_step(model):
    """The devices that take part in a step."""
    options = v1.RunOptions(output_partition_graphs=True, trace_level=v1.RunOptions.FULL_TRACE)
    seen = v1.RunMetadata()
    model.session.run(model.train, options=options, run_metadata=seen)
    devices = {node.device for graph in seen.partition_graphs for node in graph.node}
    return devices | {stats.device for stats in seen.step_stats.dev_stats}


@pytest.mark.parametrize(
    ("hook", "resource"),
    [(False, True), (True, True), (True, False)],
    ids=["op", "hook", "hook-reference"],
)
@rules
def test_local_step_touches_no_server(rule, hook, resource):
    model = Model(
        Servers(2, 1),
        rule,
        0,
        1,
        lambda: v1.train.MomentumOptimizer(0.1, 0.9),
        zeros([3], count=3),
        hook,
        resource=resource,
        **{PERIODS[rule]: 2},
    )
    model.start()
    model.step()
    model.step()  # exchanges
    assert model.values()["global_step"] == 1
    devices = devices_of_step(model)
    assert any("job:worker" in device for device in devices)
    assert not [device for device in devices if "job:ps" in device]
    model.step()
    assert model.values()["global_step"] == 2


@pytest.mark.parametrize("rho", [0, 0.0, np.float32(0), np.float64(0), np.zeros([])], ids=repr)
def test_no_penalty_no_operation(rho):
    """With ρ = 0 there is nothing but the gradients, and those of embeddings stay sparse."""
    with tf.Graph().as_default() as graph:
        getter = GETTERS["elastic"]("")
        with v1.variable_scope("", custom_getter=getter):
            table = v1.get_variable("table", [10, 2])
        opt = wrap("elastic", sgd(), 1, getter, rho=rho)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 3]))
        before = len(graph.get_operations())
        sgd().compute_gradients(loss)
        bare = len(graph.get_operations()) - before
        ((g, _),) = opt.compute_gradients(loss)
        assert len(graph.get_operations()) - before == 2 * bare
        assert isinstance(g, tf.IndexedSlices)


def test_exchange_pulls_once_and_pushes_once():
    """Elastic: `c` comes, `δ` goes, and nothing else of that size."""
    model = Model(Servers(1, 1), "elastic", 0, 1, sgd, zeros([1000]), True, rho=0.0)
    crossing = {
        tensor.ref(): tensor
        for op in ancestors(model.opt._steps[0].exchange.op)
        for tensor in op.inputs
        if tensor.shape.as_list() == [1000]
        and ("job:ps" in tensor.op.device) != ("job:ps" in op.device)
    }.values()
    assert sorted("job:ps" in tensor.op.device for tensor in crossing) == [False, True]


def ancestors(op):
    seen, todo = {op}, [op]
    while todo:
        op = todo.pop()
        new = {*(t.op for t in op.inputs), *op.control_inputs} - seen
        seen |= new
        todo += new
    return seen


@pytest.mark.parametrize("hook", [False, True], ids=["op", "hook"])
@pytest.mark.parametrize("bad", ["small", "large"])
def test_agn_forgets_all_gradients_of_an_exchange_that_fails(bad, hook):
    """Of both servers' variables, however long it takes to look at them."""
    sizes = {"small": 1, "large": 4_000_000}

    def build(model):
        model.g = {name: v1.placeholder_with_default(1.0, [], f"g_{name}") for name in sizes}
        made = {
            name: v1.get_variable(name, [size], initializer=v1.zeros_initializer())
            for name, size in sizes.items()
        }
        return [(tf.fill([size], model.g[name]), made[name]) for name, size in sizes.items()]

    options = {"communication_period": 2}
    model = Model(Servers(2, 1), "agn", 0, 1, sgd, build, hook, **options)
    assert len({trio.center.device for trio in model.trios}) == 2
    checks = [op for op in ancestors(model.opt._steps[0].exchange.op) if op.type == "CheckNumerics"]
    assert len(checks) == 2
    for check in checks:  # whichever fails, and whenever
        before = [op for op in ancestors(check) if op.type == "AssignVariableOp"]
        assert {op.inputs[0].op for op in before} == {t.beside.handle.op for t in model.trios}
    with model.graph.as_default():
        kept = [tf.reduce_mean(tf.abs(trio.beside)) for trio in model.trios]
    model.start()
    model.step()
    assert model.session.run(kept) == [1.0, 1.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"'{bad}' has NaN or Inf"):
        model.step({model.g[bad]: np.nan})
    assert model.session.run(kept) == [0.0, 0.0]


def test_averaging_makes_no_lock_that_it_does_not_take():
    def locks(rule):
        model = Model(Servers(1, 1), rule, 0, 1, sgd, zeros([3]), True)
        made = [op for op in model.graph.get_operations() if op.type == "MutexV2"]
        return [op.get_attr("shared_name").decode() for op in made]

    assert [name.endswith("/turn") for name in locks("average")] == [True]
    assert [name.endswith("/turn_job:ps_task:0") for name in locks("elastic")] == [True]


@rules
def test_whatever_is_fetched_under_the_hook(rule):
    def build(model):
        v = v1.get_variable("v", initializer=[1.0, 2.0])
        model.v = v
        model.sparse = tf.sparse.from_dense(v)
        return tf.reduce_sum(tf.square(v))

    model = Model(
        Servers(1, 1),
        rule,
        0,
        1,
        lambda: v1.train.GradientDescentOptimizer(0.1),
        build,
        True,
        **{PERIODS[rule]: 1},
    )
    model.start()
    run = model.session.run
    run({"step": model.train, "v": model.v})
    run((model.train, [model.sparse]))
    run([model.train.name, "v:0"])
    assert run(model.global_step) == 3
    run([model.v, model.sparse])
    assert run(model.global_step) == 3
