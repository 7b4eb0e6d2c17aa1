"""What is asked of a cluster, and how a run that goes on remembers it."""

from dataclasses import asdict

import pytest

from springline.cluster import Cluster
from springline.launch.directory import LaunchError
from springline.launch.request import ClusterRequest
from springline.run import Run


def test_what_was_not_said_is_as_in_the_last_launch(tmp_path):
    before = ClusterRequest("auto", shards=4, storage="/shared", cpus=2.0)
    assert ClusterRequest().over(asdict(before), tmp_path) == before
    elsewhere = ClusterRequest("10.0.0.1:6379", cpus=1.0).over(asdict(before), tmp_path)
    assert elsewhere == ClusterRequest("10.0.0.1:6379", shards=4, storage="/shared", cpus=1.0)
    assert ClusterRequest().over(None, tmp_path) == ClusterRequest()


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        ({"storage": "/shared"}, {"storage": "/other"}, "started with `--storage /shared`"),
        ({}, {"storage": "/other"}, "started without `--storage`, for good"),
        ({"shards": 2}, {"shards": 3}, "Received: `--center-shards 3`"),
    ],
)
def test_what_holds_the_center_is_for_good(tmp_path, before, now, sentence):
    asked = asdict(ClusterRequest("auto", **before))
    with pytest.raises(LaunchError, match=sentence):
        ClusterRequest(**now).over(asked, tmp_path)


def test_a_worker_finds_the_cluster_in_its_environment():
    cluster = Cluster("10.0.0.1:6379", "digits", storage="s3://bucket/digits")
    told = cluster.environment() | {"SPRINGLINE_RANK": "1", "SPRINGLINE_WORKERS": "2"}
    run = Run.from_environment(told)
    assert (run.cluster, run.rank, run.workers) == (cluster, 1, 2)
    assert str(run.center_directory) == "runs/digits/center"  # nobody has given it one
    assert Run.from_environment({}).cluster is None


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"SPRINGLINE_CENTER": "digits"}, "SPRINGLINE_ADDRESS=None"),
        ({"SPRINGLINE_ADDRESS": "auto"}, "SPRINGLINE_CENTER=None"),
        (
            {"SPRINGLINE_ADDRESS": "a", "SPRINGLINE_CENTER": "b", "SPRINGLINE_SHARDS": "many"},
            "SPRINGLINE_SHARDS must be an integer >= 1. Received: 'many'",
        ),
    ],
)
def test_an_environment_that_says_half_is_refused(told, sentence):
    with pytest.raises(ValueError, match=sentence):
        Cluster.from_environment(told)
