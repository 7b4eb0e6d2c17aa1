"""Where the center of a run on a cluster belongs, without a cluster."""

import contextlib
import hashlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from served import Service
from springline import ElasticAverage, Worker
from springline.center import Layout
from springline.center.served.storage import Storage
from springline.launch import home
from springline.launch.directory import LaunchError
from springline.launch.home import center_name
from springline.launch.request import ClusterRequest
from springline.launch.state import CenterStatus, LaunchState

LAYOUT, RULE = Layout.of({"w": np.zeros(4, np.float32)}), ElasticAverage(workers=2)


def test_every_run_has_a_storage_of_its_own(tmp_path):
    run = tmp_path / "run"
    one, two = center_name(run), center_name(run)  # on two machines, say
    assert re.fullmatch(r"run-[0-9a-f]{8}", one)
    for given, start in (
        ("/shared", "/shared/"),
        ("s3://bucket", "s3://bucket/"),
        ("m://", "m://"),
    ):
        asked = ClusterRequest("auto", storage=given)
        assert home.storage_of(asked, run, one) == f"{start}{one}"
        assert home.storage_of(asked, run, one) != home.storage_of(asked, run, two)
    assert home.storage_of(ClusterRequest("auto", storage="none"), run, one) is None
    assert home.storage_of(ClusterRequest("auto"), run, one) == str(run / "center" / "shards")


def test_a_run_keeps_the_name_of_its_center_when_it_is_moved(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    LaunchState("train.py", [], 0.0, 1).write(run)  # on this machine alone
    name = center_name(run)
    LaunchState("train.py", [], 0.0, 1, cluster={}, center=name).write(run)
    run.rename(moved)
    assert center_name(moved) == name


@pytest.mark.parametrize("left", ["launch.json", "center/status.json"])
def test_a_run_of_an_earlier_version_is_called_after_its_path(tmp_path, left):
    if left == "launch.json":
        LaunchState("train.py", [], 0.0, 1, cluster={"address": "auto"}).write(tmp_path)
    else:
        CenterStatus({}, 0, [], []).write(tmp_path / "center")
    digest = hashlib.sha256(str(tmp_path).encode()).hexdigest()
    assert center_name(tmp_path) == f"{tmp_path.name}-{digest[:8]}"


class Members(contextlib.nullcontext):
    """A center on a cluster with members of which one after the other leaves."""

    def __init__(self, *ranks):
        super().__init__(self)
        self._ranks = list(ranks)

    def members(self):
        return [self._ranks.pop(), *self._ranks] if self._ranks else []


def test_a_copy_of_a_run_does_not_use_the_center_of_the_other(tmp_path, monkeypatch):
    LaunchState("train.py", [], 0.0, 1, center="digits-1").write(tmp_path)
    there = {"digits-1": Members(0, 1, 2)}
    monkeypatch.setattr(home, "open_center", there.get)
    monkeypatch.setattr(home.time, "sleep", lambda _: None)
    assert not home.check_center(tmp_path, "digits-1", None)
    assert there["digits-1"].members() == []  # they were waited for
    there["digits-1"] = Members(0, 1)
    monkeypatch.setattr(home, "_LEAVING", -1.0)
    with pytest.raises(LaunchError, match=r"Workers of another launcher .* digits-1, .*: ranks \["):
        home.check_center(tmp_path, "digits-1", None)


def test_a_new_run_does_not_go_on_with_the_center_of_another(tmp_path, monkeypatch):
    run, empty, full = (tmp_path / name for name in ("run", "empty", "full"))
    run.mkdir()
    Storage(str(full)).write("head", {})
    there = {"digits-1": Members()}
    monkeypatch.setattr(home, "open_center", there.get)
    home.check_center(run, "digits-2", str(empty))
    assert not empty.exists()
    with pytest.raises(LaunchError, match="is new, but its center, digits-1, is on the cluster"):
        home.check_center(run, "digits-1", str(empty))
    with pytest.raises(LaunchError, match=f"is new, but {full} holds the center of another run"):
        home.check_center(run, "digits-2", str(full))
    LaunchState("train.py", [], 0.0, 1).write(run)  # its launcher was killed early
    home.check_center(run, "digits-1", str(empty))
    home.check_center(run, "digits-2", str(full))


def test_a_copy_that_is_newer_than_the_storage_is_kept(tmp_path):
    run, place = tmp_path / "run", str(tmp_path / "storage")
    (run / "center").mkdir(parents=True)
    values = {"w": np.zeros(4, np.float32)}
    service = Service(LAYOUT, RULE, values, True, None, shards=1, storage=place)
    try:
        Storage(place).write("head", service.description)
        said = []
        home.keep_newer(run, place, said.append)
        with Worker(values, RULE, service.open(), 0, synchronous=False) as one:
            for version in (1, 2):
                one.parameters["w"][:] = version
                one.exchange()
                one.center.save(run / "center" / "checkpoint.safetensors")
                service.shards[0].target.save() if version == 1 else None
                home.keep_newer(run, place, said.append)
            center = one.center.values()["w"].copy()
    finally:
        service.close()
    (words,) = said
    assert f"{place} has the center of version 1, older than" in words
    kept = run / "center-version-2.safetensors"
    assert words.endswith(f"The run goes on from version 1; the copy is kept as {kept}.")
    np.testing.assert_array_equal(load_file(kept)["w"], center)


def test_a_run_whose_center_is_gone_does_not_begin_anew(tmp_path, monkeypatch):
    run, full = tmp_path / "run", tmp_path / "full"
    (run / "center").mkdir(parents=True)
    CenterStatus({}, 0, [], []).write(run / "center")
    Storage(str(full)).write("head", {})
    there = {"digits-1": Members()}
    monkeypatch.setattr(home, "open_center", there.get)
    home.check_center(run, "digits-1", None)
    home.check_center(run, "digits-2", str(full))
    with pytest.raises(LaunchError, match="was started with `--storage none`: it is gone"):
        home.check_center(run, "digits-2", None)
    with pytest.raises(LaunchError, match=f"is not in {tmp_path / 'empty'} any more: it is gone"):
        home.check_center(run, "digits-2", str(tmp_path / "empty"))
