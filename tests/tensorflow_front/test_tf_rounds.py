"""Rounds of averaging when workers are killed in them, end early, or have nothing to give."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import INNERS, Model, Servers, close, held, together

from marks import slow
from springline.center.waiting import wait_until
from springline.tensorflow import members
from springline.tensorflow.members import Members, Table
from springline.tensorflow.shards import DeviceShard

v1 = tf.compat.v1
ways = pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
NAME = "ModelAverageOptimizer/global_center_variable/v0"


def scalars(model):
    """Two variables on two servers; worker k's gradients are -1 - k, or what is fed."""
    model.g = v1.placeholder_with_default(-1.0 - model.worker, [])
    made = [v1.get_variable(f"v{k}", initializer=0.0) for k in range(2)]
    return [(model.g, v) for v in made]


def worker(servers, k, hook=True, workers=2, **options):
    options = {"interval_steps": 1, "timeout": 10.0, **options}
    inner = partial(INNERS["sgd"], 1.0)
    return Model(servers, "average", k, workers, inner, scalars, hook, **options)


def started(*args, **options):
    model = worker(*args, **options)
    model.start()
    return model


def check(model, center, global_step):
    values = model.values()
    close(list(values["center"].values()), [center, center])
    assert values["global_step"] == global_step


@pytest.mark.parametrize("stuck", [*slow(0), 1])
def test_killed_between_two_servers(stuck):
    """The last one to come has reached one server when it dies; rounds go on as if it had not."""
    servers = Servers(2, 2)
    models = [started(servers, k) for k in range(2)]
    together(models, [None, None])
    check(models[0], 1.5, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(models[0].step)
        raw = models[1].session.run_step_fn(lambda step_context: step_context.session)
        step = models[1].opt._steps[0]
        raw.run(models[1].train, {step.exchanged: 0})
        with held(servers, f"springline/{NAME}/turn", f"/job:ps/task:{stuck}"):
            options = v1.RunOptions(timeout_in_ms=1000)
            with pytest.raises(tf.errors.OpError):
                raw.run(step.exchange[0], options=options)
        models[1] = started(servers, 1)
        models[1].step()
        waiting.result()
    check(models[0], 3.0, 2)
    for n in (3, 4):
        together(models, [None, None])
        check(models[n % 2], 1.5 * n, n)


@ways
def test_entered_and_not_added_counts_once_and_is_not_waited_for(hook):
    """Killed after it was entered: the mean of that round is the other's, of the next both's."""
    servers = Servers(2, 2)
    models = [started(servers, k, hook) for k in range(2)]
    together(models, [None, None])
    with models[1].graph.as_default() if not hook else tf.Graph().as_default() as graph:
        rounds = list(models[1].opt._rounds.values())
        tables = [Table(r._shard, f"{NAME}/rounds") for r in rounds]
        last = tables[0]["rounds closed"]
        enter = [table.put("/job:worker/task:1", last + 1) for table in tables]
    with servers.session(1, graph) as session:
        session.run(enter)
    models[0].step()
    check(models[0], 2.5, 2)
    models[1] = started(servers, 1, hook)
    together(models, [None, None])
    check(models[0], 4.0, 3)


def test_a_worker_is_entered_before_anything_is_added():
    model = worker(Servers(2, 2), 0)
    added = [op for op in model.graph.get_operations() if op.type.endswith("ApplyGradient")]
    assert len(added) == 2
    for op in added:
        assert any("TableInsert" in before.type for before in ancestors(op))


def ancestors(op):
    seen, todo = {op}, [op]
    while todo:
        op = todo.pop()
        new = {*(t.op for t in op.inputs), *op.control_inputs} - seen
        seen |= new
        todo += new
    return seen


def end(model):
    with model.graph.as_default():
        model.session.close()


def test_a_worker_that_ends_is_no_longer_a_member():
    servers = Servers(2, 2)
    models = [started(servers, k) for k in range(2)]
    together(models, [None, None])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(models[0].step)
        end(models[1])  # whether the other is in the round already or not
        waiting.result()
    check(models[0], 2.5, 2)
    models[0].step()
    check(models[0], 3.5, 3)
    models[1] = started(servers, 1)  # and is one again from its start
    together(models, [None, None])
    check(models[0], 5.0, 4)


@ways
@pytest.mark.parametrize("first", [0, *slow(1)])
def test_training_again_after_all_have_left(first, hook):
    """Nobody waits for one that may have finished; those that are back wait for each other."""
    servers = Servers(2, 2)
    models = [started(servers, k) for k in range(2)]
    together(models, [None, None])
    end(models[1 - first])
    end(models[first])
    models[first] = back(servers, first, hook)
    models[first].step()
    alone = 1.5 + (1.0 + first)
    check(models[first], alone, 2)

    models[1 - first] = back(servers, 1 - first, hook)
    if hook:  # it is waited for from its start
        together(models, [None, None])
    else:  # from its first round
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(models[1 - first].step)
            wait_for_entry(servers, models[1 - first])
            models[first].step()
            waiting.result()
    check(models[0], alone + 1.5, 3)
    together(models, [None, None])
    check(models[1], alone + 3.0, 4)


def back(servers, k, hook):
    """Start a worker where there is a center already."""
    model = worker(servers, k, hook)
    model.globals = model.locals
    model.start()
    return model


def wait_for_entry(servers, model):
    """Wait until a worker is in a round on every server."""
    with tf.Graph().as_default() as graph:
        tables = [Table(DeviceShard(shard.device), f"{NAME}/rounds") for shard in model.opt._rounds]
        numbers = [table[f"/job:worker/task:{model.worker}"] for table in tables]
    with servers.session(model.worker, graph) as session:

        def is_in():
            return all(0 < number < tf.int64.max for number in session.run(numbers))

        wait_until(is_in, list, 30.0, "a worker to be in a round")


def test_servers_that_are_gone_do_not_fail_the_end(caplog, monkeypatch):
    model = started(Servers(2, 2), 0)

    def fail(session, options):
        raise tf.errors.UnavailableError(None, None, "gone")

    monkeypatch.setattr(model.opt, "end_in", fail)
    end(model)
    assert "Could not report to the servers that this worker ends: gone" in caplog.text


@pytest.mark.parametrize("hook", [False, True], ids=["op", "hook"])
@pytest.mark.parametrize("bad", [np.nan, *slow(np.inf)])
def test_a_worker_with_nan_stays_out_of_the_round(hook, bad):
    servers = Servers(2, 2)
    models = [started(servers, k, hook) for k in range(2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(models[0].step)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"'v[01]' has NaN or Inf"):
            models[1].step({models[1].g: bad})
        waiting.result()
    check(models[0], 1.0, 1)
    models[1] = started(servers, 1, hook)
    together(models, [None, None])
    check(models[0], 2.5, 2)


@ways
def test_a_round_of_nothing_is_closed_and_not_counted(hook):
    servers = Servers(2, 2)
    models = [started(servers, k, hook) for k in range(2)]
    for model in models:
        with pytest.raises(tf.errors.InvalidArgumentError, match="has NaN or Inf"):
            model.step({model.g: np.nan})
    check(models[0], 0.0, 0)
    models = [started(servers, k, hook) for k in range(2)]
    together(models, [None, None])
    check(models[0], 1.5, 1)


def test_waiting_in_a_graph_pauses():
    looks = []

    def look():
        def seen():
            looks.append(1)
            return np.bool_(False)

        return tf.ensure_shape(tf.numpy_function(seen, [], tf.bool), []), tf.constant(["somebody"])

    with tf.Graph().as_default(), v1.Session() as session:
        waited = members.wait_in_graph(look, 0.5, "nothing")
        with pytest.raises(tf.errors.InvalidArgumentError, match="somebody"):
            session.run(waited)
    # 100 of the longest pause, and those that are shorter.
    assert 1 < len(looks) < 150


@pytest.mark.parametrize(
    ("device", "chief", "names"),
    [
        ("/job:worker/task:1", False, ["worker/task:0", "worker/task:1", "worker/task:2"]),
        ("/job:worker/task:1", True, ["chief/task:0", "worker/task:0", "worker/task:1"]),
        ("/job:chief/task:0", False, ["chief/task:0", "worker/task:0", "worker/task:1"]),
        ("/job:chief", True, ["chief/task:0", "worker/task:0", "worker/task:1"]),
        ("/job:trainer/task:0", False, ["trainer/task:0", "trainer/task:1", "trainer/task:2"]),
    ],
)
def test_names_of_members(device, chief, names, monkeypatch):
    jobs = {"chief": ["a:1"], "worker": ["b:1", "c:1"]} if chief else {"worker": ["a:1"] * 3}
    monkeypatch.setenv("TF_CONFIG", tf.compat.as_str(str({"cluster": jobs}).replace("'", '"')))
    found = Members(device, 3)
    assert found.names == [f"/job:{name}" for name in names]
    assert found.task in found.names
    monkeypatch.setenv("TF_CONFIG", "not JSON")
    assert len(Members(device, 3).names) == 3
