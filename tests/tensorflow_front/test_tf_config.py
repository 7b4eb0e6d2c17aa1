"""`cluster()`: which part of a `TF_CONFIG` is wrong, and a run that has none."""

import json

import pytest
import tensorflow as tf
from tf_eager import RUN

from springline.tensorflow import cluster
from springline.tensorflow.cluster import Cluster
from springline.tensorflow.members import Members
from springline.tensorflow.tf_config import has_chief, read

JOBS = {"ps": ["a:1"], "worker": ["b:1", "c:1"]}


def config(cluster=JOBS, **task):
    return json.dumps({"cluster": cluster, "task": task})


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*RUN, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{'cluster': {}}", r"not JSON: Expecting property name .* column 2"),
        ("[1]", r"not an object"),
        ("{}", r"'cluster' must have a list of addresses"),
        (config(["a:1"], type="ps", index=0), r"'cluster' must have"),
        (config({"ps": "a:1"}, type="ps", index=0), r"'cluster' must have"),
        (json.dumps({"cluster": JOBS}), r"'task' must have the 'type' and the 'index'"),
        (config(type="worker"), r"'task' must have"),
        (config(type="worker", index=2), r"'index' is 2, but 'worker' has 0, 1\."),
        (config(type="worker", index=-1), r"'index' is -1, but 'worker' has 0, 1"),
        (config(type="worker", index="one"), r"'index' is 'one', but"),
        (config(type="evaluator", index=0), r"'type' is 'evaluator', .* has ps, worker\. .*saver"),
        (config(type="chief", index=0), r"'type' is 'chief', but the cluster has ps, worker"),
        (config(JOBS | {"evaluator": ["d:1"]}, type="evaluator", index=0), r"is 'evaluator'"),
        (config({}, type="worker", index=0), r"the cluster has no tasks"),
    ],
)
def test_a_config_that_is_wrong(text, what, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=rf"TF_CONFIG cannot be used: .*{what}.*Received: TF_"):
        cluster()


def test_tasks_may_be_numbered():
    assert read(config(type="worker", index="1"))[1:] == ("worker", 1, "c:1")
    some = {"ps": ["a:1"], "worker": {"3": "d:1"}}
    assert read(config(some, type="worker", index=3))[1:] == ("worker", 3, "d:1")
    with pytest.raises(ValueError, match=r"'index' is 0, but 'worker' has 3"):
        read(config(some, type="worker", index=0))


@pytest.mark.parametrize("none", [[], {}])
def test_a_job_without_tasks_is_none(none, monkeypatch):
    """With an empty chief the first worker is the chief, and nobody waits for another."""
    text = config({"chief": none, **JOBS}, type="worker", index=0)
    monkeypatch.setenv("TF_CONFIG", text)
    jobs, job, task, _ = read(text)
    assert jobs == JOBS
    place = Cluster(tf.train.ClusterSpec(jobs), job, task, None)
    assert (place.is_chief, place.rank, place.num_worker) == (True, 0, 2)
    assert not has_chief()
    assert Members("/job:worker/task:0", 2).names == ["/job:worker/task:0", "/job:worker/task:1"]
    jobs, *_ = read(config({"ps": none, "worker": ["b:1"]}, type="worker", index=0))
    assert "ps" not in jobs
    with pytest.raises(ValueError, match=r"'type' is 'chief', but the cluster has ps, worker"):
        read(config({"chief": none, **JOBS}, type="chief", index=0))


def test_a_run_of_several_workers_needs_a_parameter_server(monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    with pytest.raises(RuntimeError, match=r"worker 1 of 2.*--ps 1 --workers 2.*add `--ps 1`"):
        cluster()


def test_a_run_of_one_worker_does_not(monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "1")
    for place in (cluster(), cluster()):
        assert (place.num_worker, place.rank, place.is_chief, place.device) == (1, 0, True, "")
