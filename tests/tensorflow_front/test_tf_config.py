"""`cluster()`: which part of a `TF_CONFIG` is wrong, and a run that has none."""

import json

import pytest
from tf_eager import RUN

from springline.tensorflow import cluster
from springline.tensorflow.cluster import Cluster, read_config
from springline.tensorflow.members import Members

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
        ("{'cluster': {}}", r"Expecting property name .* column 2"),
        ("[1]", r"list indices"),
        ("{}", r"'cluster'"),
        (config(["a:1"], type="ps", index=0), r"'list' object"),
        (config({"ps": "a:1"}, type="ps", index=0), r"The tasks for job 'ps' must be"),
        (json.dumps({"cluster": JOBS}), r"KeyError: 'task'"),
        (config(type="worker"), r"KeyError: 'index'"),
        (config(type="worker", index=2), r"No task with index 2 in job 'worker'"),
        (config(type="worker", index=-1), r"No task with index -1"),
        (config(type="worker", index="one"), r"'one'"),
        (config(type="evaluator", index=0), r"No such job in cluster: 'evaluator'\..*saver"),
        (config(type="chief", index=0), r"No such job in cluster: 'chief'"),
        (
            config(JOBS | {"evaluator": ["d:1"]}, type="evaluator", index=0),
            r"'evaluator'.*saver",
        ),
        (config({}, type="worker", index=0), r"No such job in cluster: 'worker'"),
    ],
)
def test_a_config_that_is_wrong(text, what, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=rf"TF_CONFIG cannot be used: .*{what}.*Received: TF_"):
        cluster()


def test_tasks_may_be_numbered():
    assert read_config(config(type="worker", index="1"))[1:] == ("worker", 1)
    some = {"ps": ["a:1"], "worker": {"3": "d:1"}}
    spec, *task = read_config(config(some, type="worker", index=3))
    assert spec.task_address(*task) == "d:1"
    with pytest.raises(ValueError, match=r"No task with index 0 in job 'worker'"):
        read_config(config(some, type="worker", index=0))


@pytest.mark.parametrize("none", [[], {}])
def test_a_job_without_tasks_is_none(none, monkeypatch):
    """With an empty chief the first worker is the chief, and nobody waits for another."""
    text = config({"chief": none, **JOBS}, type="worker", index=0)
    monkeypatch.setenv("TF_CONFIG", text)
    place = Cluster(*read_config(text), None)
    assert place.spec.as_dict() == JOBS
    assert (place.is_chief, place.rank, place.num_worker) == (True, 0, 2)
    assert Members("/job:worker/task:0", 2).names == ["/job:worker/task:0", "/job:worker/task:1"]
    spec, *_ = read_config(config({"ps": none, "worker": ["b:1"]}, type="worker", index=0))
    assert spec.jobs == ["worker"]
    with pytest.raises(ValueError, match=r"No such job in cluster: 'chief'"):
        read_config(config({"chief": none, **JOBS}, type="chief", index=0))


def test_a_run_of_several_workers_needs_a_parameter_server(monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    with pytest.raises(RuntimeError, match=r"worker 1 of 2.*--ps 1 --workers 2.*add `--ps 1`"):
        cluster()


def test_a_run_of_one_worker_does_not(monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "1")
    for place in (cluster(), cluster()):
        assert (place.num_worker, place.rank, place.is_chief, place.device) == (1, 0, True, "")
