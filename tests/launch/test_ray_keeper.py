"""How the launcher names, watches and keeps a center on a cluster, without a cluster."""

import contextlib
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from clustered import PLAN
from ray.exceptions import RayError
from safetensors.numpy import load_file

from remote import Service, worker
from springline import AGN, ElasticAverage
from springline.center import CenterError, Layout
from springline.center.remote.center import RemoteCenter
from springline.center.remote.storage import Storage
from springline.center.token import read_token
from springline.cluster_address import ClusterAddress
from springline.errors import TokenError
from springline.launch import ray_keeper
from springline.launch.directory import LaunchError
from springline.launch.keeper import storage_of
from springline.launch.ray_keeper import RayKeeper, center_name, check_center
from springline.launch_state import Asked, CenterStatus, LaunchState
from springline.rules import SGD

RULE = ElasticAverage(workers=2)


def address(center, storage=None, token="token"):
    return ClusterAddress("auto", center, token, storage=storage)


def test_every_run_has_a_storage_of_its_own(tmp_path):
    run = tmp_path / "run"
    one, two = center_name(run), center_name(run)  # on two machines, say
    assert re.fullmatch(r"run-[0-9a-f]{8}", one)
    for given, start in (
        ("/shared", "/shared/"),
        ("s3://bucket", "s3://bucket/"),
        ("m://", "m://"),
    ):
        assert storage_of(given, run, one) == f"{start}{one}"
        assert storage_of(given, run, one) != storage_of(given, run, two)
    assert storage_of("none", run, one) is None
    assert storage_of(None, run, one) == str(run / "center" / "shards")


def test_a_run_keeps_the_name_of_its_center_when_it_is_moved(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    LaunchState("train.py", [], 0.0, 1).write(run)  # on this machine alone
    name = center_name(run)
    LaunchState("train.py", [], 0.0, 1, cluster=Asked(), center=name).write(run)
    run.rename(moved)
    assert center_name(moved) == name


class Members(contextlib.nullcontext):
    """A center on a cluster with members of which one after the other leaves."""

    def __init__(self, *ranks):
        super().__init__(self)
        self._ranks = list(ranks)

    def members(self):
        return [self._ranks.pop(), *self._ranks] if self._ranks else []


def test_a_copy_of_a_run_does_not_use_the_center_of_the_other(tmp_path, monkeypatch):
    LaunchState("train.py", [], 0.0, 1, center="digits-0000000a").write(tmp_path)
    there = {"digits-1": Members(0, 1, 2)}
    monkeypatch.setattr(ray_keeper, "open_center", lambda cluster: there.get(cluster.center))
    monkeypatch.setattr(ray_keeper.time, "sleep", lambda _: None)
    check_center(tmp_path, address("digits-1"))
    assert there["digits-1"].members() == []  # they were waited for
    there["digits-1"] = Members(0, 1)
    monkeypatch.setattr(ray_keeper, "_LEAVING", -1.0)
    with pytest.raises(LaunchError, match=r"Workers of another launcher .* digits-1, .*: ranks \["):
        check_center(tmp_path, address("digits-1"))


def test_a_run_whose_center_is_gone_does_not_start_over(tmp_path, monkeypatch):
    run, full = tmp_path / "run", tmp_path / "full"
    (run / "center").mkdir(parents=True)
    CenterStatus(PLAN, 0, [], []).write(run / "center")
    Storage(str(full)).write("head", {})
    there = {"digits-1": Members()}
    monkeypatch.setattr(ray_keeper, "open_center", lambda cluster: there.get(cluster.center))
    check_center(run, address("digits-1"))
    check_center(run, address("digits-2", str(full)))
    with pytest.raises(LaunchError, match="was started with `--storage none`: it is gone"):
        check_center(run, address("digits-2"))
    with pytest.raises(LaunchError, match=f"is not in {tmp_path / 'empty'} any more: it is gone"):
        check_center(run, address("digits-2", str(tmp_path / "empty")))


def test_a_run_whose_token_is_lost_says_where_it_was(tmp_path, monkeypatch):
    def refuse(cluster):
        raise TokenError("not that of this center")

    monkeypatch.setattr(ray_keeper, "open_center", refuse)
    words = f"digits-1 of the run in {tmp_path} .* not in {tmp_path}/token. Copy that file"
    with pytest.raises(LaunchError, match=words):
        check_center(tmp_path, address("digits-1", token="another"))
    with pytest.raises(TokenError, match=f"Cannot read {tmp_path}/token, .*: No such file"):
        read_token(tmp_path)


@pytest.fixture
def serve(monkeypatch):
    """`serve(rule, values)` makes a center in this process, which keepers find."""
    services = []

    def serve(rule, values, **options):
        service = Service(Layout.of(values), rule, values, True, None, **options)
        services.append(service)
        monkeypatch.setattr(ray_keeper, "open_center", lambda cluster: service.open())
        monkeypatch.setattr(RemoteCenter, "retire", lambda center: None, raising=False)
        service.told = []
        service.head.tell = lambda *words: service.told.append(words)
        return service

    yield serve
    for service in services:
        service.close()


def keeper_of(run, said=None, storage=None):
    (run / "center").mkdir(exist_ok=True)
    say = [].append if said is None else said.append
    return RayKeeper(SimpleNamespace(path=run), say, address("digits", storage), lambda: [1])


def test_shards_in_trouble_are_reported_once_and_the_center_is_asked_to_stay(
    serve, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(ray_keeper, "_TROUBLE", 0.0)
    service = serve(RULE, {"w": np.zeros(4, np.float32)})
    for shard in service.shards:
        failed = replace(shard.target.trouble(), failed="OSError: no space left")
        shard.target.trouble = lambda failed=failed: failed
    keeper = keeper_of(tmp_path)
    keeper._look()
    keeper._look()
    assert caplog.messages == ["No checkpoint of shard 0: OSError: no space left"]
    assert service.told == [("stay", [1])] * 2
    assert CenterStatus.read(tmp_path / "center").version == 0


def test_what_a_shard_has_lost_is_reported(serve, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ray_keeper, "_TROUBLE", 0.0)
    rule = AGN(workers=2, period=1, outer=SGD(1.0))
    service = serve(rule, {"w": np.zeros(4, np.float32)}, storage=str(tmp_path / "store"))
    keeper, one = keeper_of(tmp_path), worker(service)

    def exchange(times):
        for _ in range(times):
            one.observe({"w": -np.ones(4, np.float32)})
            one.exchange()

    exchange(3)
    service.shards[0].target.save()
    exchange(4)
    keeper._look()
    assert not caplog.messages
    service.shards[0].target = service.make[0]()  # it has died
    exchange(1)
    keeper._look()
    keeper._look()
    np.testing.assert_array_equal(one.center.values()["w"], 4)
    assert caplog.messages == [
        "Shard 0 was restarted: 4 exchanges are lost in its part of the center."
    ]


def test_the_center_is_fetched_at_the_end(serve, tmp_path):
    serve(RULE, {"w": np.full(4, 3, np.float32)})
    keeper = keeper_of(tmp_path)
    keeper.start()
    np.testing.assert_array_equal(load_file(keeper.finish())["w"], 3)


class Silent(contextlib.nullcontext):
    """A center on a cluster that does not answer."""

    def nobody(self, *_):
        raise RayError("nobody is there")

    values = nobody
    head = version = property(nobody)


def test_a_cluster_that_does_not_answer_ends_no_keeper(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_keeper, "_EVERY", 0.001)
    opened, often = [], threading.Event()

    def open_center(*_):
        opened.append(Silent())
        opened[-1].__enter__ = lambda: opened[-1]
        if len(opened) > 6:
            often.set()
        return opened[-1]

    monkeypatch.setattr(ray_keeper, "open_center", open_center)
    keeper = keeper_of(tmp_path)
    keeper.start()
    assert often.wait(30.0)
    with pytest.raises(CenterError) as raised:
        keeper.finish()
    assert str(raised.value) == "The cluster has not answered: nobody is there"


def test_a_center_that_has_left_the_cluster_is_in_its_storage(serve, tmp_path, monkeypatch):
    """And not what an earlier launch has left."""
    storage = str(tmp_path / "store")
    serve(RULE, {"w": np.full(4, 2, np.float32)}, storage=storage)
    (tmp_path / "center.safetensors").write_bytes(b"of an earlier launch")
    kept, unkept = keeper_of(tmp_path, storage=storage), keeper_of(tmp_path)
    for keeper in (kept, unkept):
        keeper.start()
        keeper._look()
    monkeypatch.setattr(ray_keeper, "open_center", lambda cluster: None)
    with pytest.raises(CenterError, match=rf"the cluster, but in {storage}: `springline export`"):
        kept.finish()
    with pytest.raises(CenterError, match="no longer on the cluster, and it had no storage"):
        unkept.finish()


def test_a_launch_without_workers_keeps_what_an_earlier_one_has_left(tmp_path, monkeypatch):
    (tmp_path / "center.safetensors").write_bytes(b"of an earlier launch")
    keeper = keeper_of(tmp_path)
    monkeypatch.setattr(ray_keeper, "open_center", lambda cluster: None)
    keeper.start()
    assert keeper.finish().read_bytes() == b"of an earlier launch"
