"""What is asked of a cluster, and how a run that goes on remembers it."""

import pytest
from clustered import PLAN

from springline.cluster_address import ClusterAddress
from springline.launch.directory import LaunchError
from springline.launch.request import ClusterRequest
from springline.launch_state import CenterStatus
from springline.progress import report
from springline.run import Run


def test_what_was_not_said_is_as_in_the_last_launch(tmp_path):
    before = ClusterRequest("auto", shards=4, storage="/shared", cpus=2.0)
    assert ClusterRequest().over(before, tmp_path) == before
    elsewhere = ClusterRequest("10.0.0.1:6379", cpus=1.0).over(before, tmp_path)
    assert elsewhere == ClusterRequest("10.0.0.1:6379", shards=4, storage="/shared", cpus=1.0)
    assert ClusterRequest().over(None, tmp_path) == ClusterRequest()


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        ({"storage": "/shared"}, {"storage": "/other"}, "started with `--storage /shared`"),
        ({}, {"storage": "/other"}, "started without `--storage`, which is fixed"),
        ({"shards": 2}, {"shards": 3}, "Received: `--center-shards 3`"),
    ],
)
def test_what_holds_the_center_is_for_good(tmp_path, before, now, sentence):
    asked = ClusterRequest("auto", **before)
    new = ClusterRequest(**now).over(asked, tmp_path)  # there is no center yet
    assert new == ClusterRequest("auto", **before | now)
    CenterStatus(PLAN, 0, [], []).write(tmp_path / "center")
    with pytest.raises(LaunchError, match=sentence):
        ClusterRequest(**now).over(asked, tmp_path)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"gpus": 1.5}, "`--gpus` above 1 must be a whole number. Received: 1.5."),
        ({"gpus": 1e-5}, "`--gpus` must be 0 or a number >= 0.0001. Received: 1e-05."),
        ({"cpus": -1.0}, "`--cpus` must be 0 or a number >= 0.0001. Received: -1."),
        ({"cpus": float("nan")}, "Received: nan."),
        ({"cpus": float("inf")}, "Received: inf."),
    ],
)
def test_what_no_machine_can_give_is_refused(asked, sentence):
    with pytest.raises(LaunchError, match=sentence):
        ClusterRequest("auto", **asked).check(None)


def test_parts_of_a_gpu_and_several_can_be_had():
    for gpus in (0.0, 0.0001, 0.5, 1.0, 2.0):
        ClusterRequest("auto", cpus=1.5, gpus=gpus).check(None)


def test_a_report_makes_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path / "runs" / "digits"))
    report("It went well.")
    for name, value in (("RANK", "1"), ("WORKERS", "2")):
        monkeypatch.setenv(f"SPRINGLINE_{name}", value)
    report("It went otherwise here.")  # only rank 0's is kept
    assert (tmp_path / "runs" / "digits" / "report.txt").read_text() == "It went well.\n"
    assert (tmp_path / "runs" / "digits").stat().st_mode & 0o777 == 0o700


def test_ranks_of_a_process_group_that_torchrun_has_not_started():
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    assert Run.from_environment(told) == Run(None, 1, 2)
    assert Run.from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Run(None, 0, 1)


def test_a_worker_finds_the_cluster_in_its_environment():
    cluster = ClusterAddress("10.0.0.1:6379", "digits", "theirs", storage="s3://bucket/digits")
    assert "theirs" not in repr(cluster)
    told = cluster.environment() | {"SPRINGLINE_RANK": "1", "SPRINGLINE_WORKERS": "2"}
    run = Run.from_environment(told)
    assert (run.cluster, run.rank, run.workers) == (cluster, 1, 2)
    assert str(run.center_directory) == "runs/digits/center"  # nobody has given it one
    assert Run.from_environment({}).cluster is None


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"SPRINGLINE_CENTER": "digits"}, "SPRINGLINE_ADDRESS=''"),
        ({"SPRINGLINE_ADDRESS": "auto"}, "SPRINGLINE_CENTER=''"),
        (
            {"SPRINGLINE_ADDRESS": "a", "SPRINGLINE_CENTER": "b"},
            r"SPRINGLINE_TOKEN is not set: .* workers of 'b' .*`openssl rand -hex 32`",
        ),
        (
            {
                **{"SPRINGLINE_ADDRESS": "a", "SPRINGLINE_CENTER": "b", "SPRINGLINE_TOKEN": "c"},
                "SPRINGLINE_SHARDS": "many",
            },
            "SPRINGLINE_SHARDS must be an integer >= 1. Received: 'many'",
        ),
    ],
)
def test_an_environment_that_says_half_is_refused(told, sentence):
    with pytest.raises(ValueError, match=sentence):
        ClusterAddress.from_environment(told)
