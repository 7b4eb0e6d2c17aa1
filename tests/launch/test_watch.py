"""What the launcher hears of a center on a cluster."""

import os
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from served import Service, worker
from springline import AGN, ElasticAverage
from springline.center import CenterError, Layout
from springline.center.served.center import ServedCenter
from springline.launch import watch
from springline.launch.state import CenterStatus
from springline.launch.watch import CenterWatch, ClusterKeeper
from springline.rules import SGD

RULE = ElasticAverage(workers=2)


@pytest.mark.parametrize(("size", "which"), [(4, "shard 0"), (200_000, "shard 0 and 2 more")])
def test_shards_in_trouble_are_told_of_and_the_center_is_asked_to_stay(
    tmp_path, monkeypatch, caplog, size, which
):
    values = {"w": np.zeros(size, np.float32)}
    service = Service(Layout.of(values), RULE, values, True, None)
    told = []
    service.head.tell = lambda *words: told.append(words)
    for shard in service.shards:
        failed = replace(shard.target.trouble(), failed="OSError: no space left")
        shard.target.trouble = lambda failed=failed: failed
    monkeypatch.setattr(watch, "open_center", lambda name: service.open())
    looking = CenterWatch(tmp_path, "digits")
    (tmp_path / "center").mkdir()
    looking._look()
    looking._look()  # it does not ask again at once
    service.close()
    assert caplog.messages == [f"No checkpoint of {which}: OSError: no space left"]
    assert told == [("stay",)] * 2
    assert CenterStatus.read(tmp_path / "center").version == 0


@pytest.mark.parametrize("copied", ["before it was killed", "before its checkpoint"])
def test_what_a_shard_has_lost_is_said_and_a_copy_that_has_more_is_kept(
    tmp_path, monkeypatch, caplog, copied
):
    """Its storage has failed: it goes back further than the copy in the run directory."""
    monkeypatch.setattr(watch, "_TROUBLE", 0.0)
    rule = AGN(workers=2, period=1, optimizer=SGD(1.0))
    values, place = {"w": np.zeros(4, np.float32)}, str(tmp_path / "store")
    service = Service(Layout.of(values), rule, values, True, None, storage=place)
    service.head.tell = lambda *_: None  # to stay, as it does
    monkeypatch.setattr(watch, "open_center", lambda name: service.open())
    looking = CenterWatch(tmp_path, "digits")
    one = worker(service)

    def exchange(times):
        for _ in range(times):
            one.observe({"w": -np.ones(4, np.float32)})
            one.exchange()

    def save():
        one.center.save(copy)
        os.utime(copy, (time.time(),) * 2)  # the kernel's own clock ticks slowly

    exchange(2)
    copy = tmp_path / "center" / "checkpoint.safetensors"
    copy.parent.mkdir()
    if copied == "before its checkpoint":
        save()
    exchange(1)
    service.shards[0].target.save()
    exchange(4)
    if copied == "before it was killed":
        save()
    looking._look()
    assert not caplog.messages
    service.shards[0].target = service.make[0]()
    exchange(1)
    looking._look()
    looking._look()
    np.testing.assert_array_equal(one.center.values()["w"], 4)
    service.close()
    assert caplog.messages[0] == "shard 0 was started again."
    assert "s ago: 4 exchanges are lost in its part" in caplog.messages[1]
    kept = tmp_path / "center-version-7.safetensors"
    assert kept.exists() == (copied == "before it was killed")
    assert len(caplog.messages) == 2 + kept.exists()
    if kept.exists():
        np.testing.assert_array_equal(load_file(kept)["w"], 7)


def test_more_shards_than_the_model_can_be_cut_into_are_said(tmp_path, monkeypatch, caplog):
    values = {"w": np.zeros(4, np.float32)}
    service = Service(Layout.of(values), RULE, values, True, None)
    service.head.tell = lambda *_: None
    monkeypatch.setattr(watch, "open_center", lambda name: service.open())
    (tmp_path / "center").mkdir()
    looking = CenterWatch(tmp_path, "digits", 5)
    looking._look()
    looking._look()
    service.close()
    assert caplog.messages == ["Shards of the center: 1, as this model cannot be cut into 5."]


def test_a_shard_that_has_lost_all_breaks_the_center(tmp_path, monkeypatch):
    """What is left is the copy in the run directory, also where nobody can end the center."""
    values, said = {"w": np.full(200_000, 3, np.float32)}, []
    service = Service(Layout.of(values), RULE, values, True, None)
    monkeypatch.setattr(watch, "open_center", lambda name: service.open())
    assert watch.broken("digits") is None
    keeper = ClusterKeeper(tmp_path, 30.0, said.append, "digits")
    keeper.start()
    center = service.open()
    (tmp_path / "center").mkdir()
    center.save(tmp_path / "center" / "checkpoint.safetensors")
    keeper.saved = time.time()
    service.shards[1].target = service.make[1]()
    assert "Shard-1 of the center was started again and has no checkpoint" in watch.broken("digits")
    retired = mock.Mock(side_effect=CenterError("It could not be ended in time."))
    monkeypatch.setattr(ServedCenter, "retire", retired, raising=False)
    final = keeper.finish()
    service.close()
    np.testing.assert_array_equal(load_file(final)["w"], 3)
    assert "it is taken from its last checkpoint here" in said[0]
    assert retired.called
