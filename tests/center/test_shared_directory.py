"""The directory of a shared center: what is in it, what is refused, what is left behind."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from springline import AGN, ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import CenterError, Layout, member
from springline.rules import Adam
from springline.sealed import read_json, write_json

RULE = ElasticAverage(workers=2, period=1, moving_rate=0.5)
VALUES = {"v": np.arange(4, dtype=np.float32)}


def create(directory, values=VALUES, rule=RULE, **options):
    return SharedCenter.create_or_join(directory, Layout.of(values), rule, values, **options)


def test_only_its_owner_may_look_inside(directory):
    with create(directory) as center:
        center.save()
        center.save()
        for place in (directory, center._path.parent):
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
            for path in place.iterdir():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert center._path.stat().st_size == center.plan.nbytes
        assert {p.name for p in directory.iterdir()} == {
            "layout.json",
            "lock",
            "checkpoint.safetensors",
            "checkpoint-previous.safetensors",
        }


def make_file(path):
    path.write_text("mine")
    return path, "Cannot use .*Not a directory"


def make_foreign(path):
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    return path, r"is not a center's directory: it holds 'thesis.tex'.*new or an empty one"


def make_unwritable(path):
    return Path("/proc/springline/run"), "Cannot use .*Give a directory that you may write to"


def make_anothers(path):
    if os.getuid() != 0:
        return Path("/usr"), "belongs to another user"
    path.mkdir()
    os.chown(path, 65534, -1)
    return path, r"belongs to another user \(id 65534\)"


def make_damaged(path):
    create(path).close()
    text = (path / "layout.json").read_text()
    (path / "layout.json").write_text(text[: len(text) // 2])
    return path, "layout.json is cut short or damaged"


def make_from_the_future(path):
    create(path).close()
    write_json(path / "layout.json", read_json(path / "layout.json") | {"format": 999})
    return path, "not of a center that this springline can read"


def make_short(path):
    center = create(path)
    os.truncate(center._path, center.plan.nbytes - 1)
    center.close()
    return path, "shorter than the center it should hold"


@pytest.mark.parametrize(
    "make",
    [
        make_file,
        make_foreign,
        make_unwritable,
        make_anothers,
        make_damaged,
        make_from_the_future,
        make_short,
    ],
)
def test_a_directory_that_is_not_ours_is_refused_and_left_alone(directory, make):
    path, words = make(directory)
    before = sorted(p.name for p in path.iterdir()) if path.is_dir() else None
    with pytest.raises(CenterError, match=words):
        create(path)
    assert (sorted(p.name for p in path.iterdir()) if path.is_dir() else None) == before


def test_a_file_system_without_record_locks_is_named(directory, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(CenterError, match=r"refused a record lock \(No locks.*local file system"):
        create(directory)
    assert [p.name for p in directory.iterdir()] == ["lock"]


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_an_operating_system_that_we_do_not_support_is_named(directory, platform, monkeypatch):
    create(directory).close()
    monkeypatch.setattr(sys, "platform", platform)
    for attempt in (create, SharedCenter.open):
        with pytest.raises(CenterError, match=rf"needs Linux.*this is {platform}"):
            attempt(directory)


def test_open_needs_a_center(directory):
    with pytest.raises(CenterError, match="There is no center in"):
        SharedCenter.open(directory)


ADAM = AGN(workers=2, period=1, outer=Adam(0.1))


def two_steps(directory):
    """A center that two steps of rank 1 have moved."""
    worker = Worker(VALUES, ADAM, directory, 1)
    for _ in range(2):
        worker.observe({"v": np.ones(4, np.float32)})
        worker.step()
    worker.member.leave()
    return worker.center


def test_memory_that_is_gone_comes_back_from_the_checkpoint(directory, caplog):
    center = two_steps(directory)
    center.save()
    values, state = center.read(), center.memory.state.copy()
    center.close()
    shutil.rmtree(center._path.parent)
    with pytest.raises(CenterError, match=r"not in memory. Its last checkpoint is .*safetensors"):
        SharedCenter.open(directory)
    again = Worker(VALUES, ADAM, directory, 1)
    assert "memory was gone; going on from" in caplog.text
    np.testing.assert_array_equal(again.center.read(), values)
    np.testing.assert_array_equal(again.center.memory.state, state)
    assert (again.center.version, again.start_step) == (2, 2)
    again.center.close()


def test_memory_that_is_gone_without_a_checkpoint_is_told(directory):
    center = create(directory)
    center.close()
    shutil.rmtree(center._path.parent)
    for attempt in (create, SharedCenter.open):
        with pytest.raises(CenterError, match=r"is gone .*no checkpoint"):
            attempt(directory)


def test_memory_on_another_machine_is_told(directory, tmpfs):
    center = create(directory)
    center.save()
    center.join(0, RULE)
    center._path.rename(directory.parent / "on another machine")
    with pytest.raises(CenterError, match="members but its memory is not on this machine"):
        create(directory)
    assert [h for h in tmpfs.iterdir() if (h / "center.memory").exists()] == []
    center.close()


def test_retire_saves_and_frees(directory):
    center = two_steps(directory)
    member = center.join(0, ADAM)
    with pytest.raises(CenterError, match=r"still members: ranks \[0\]"):
        center.retire()
    member.leave()
    bystander = SharedCenter.open(directory)
    values, memory = center.values(), center._path
    center.retire()
    assert not memory.parent.exists()
    with pytest.raises(CenterError, match="was retired; open it again"):
        bystander.join(0, ADAM)
    bystander.close()
    with create(directory, rule=ADAM) as again:
        np.testing.assert_array_equal(again.values()["v"], values["v"])
        assert again.version == 2


def test_a_restored_center_is_not_waited_at_for_long(directory, together, monkeypatch):
    rule = ModelAverage(workers=2, period=1)
    center = create(directory, rule=rule)

    def train(rank):
        worker = Worker(VALUES, rule, center, rank, timeout=20)
        worker.step()
        worker.finish()

    together(lambda: train(0), lambda: train(1))
    center.retire()  # by the last of them, as under `torchrun`, which then restarts the other
    monkeypatch.setattr(member, "_GATHER", 0.1)
    with create(directory, rule=rule) as again:
        Worker(VALUES, rule, again, 0, timeout=20).finish()
        assert again.finished() == [0]


def test_one_line_says_whose_values_count(directory, caplog):
    caplog.set_level(logging.INFO, "springline")
    create(directory).close()
    create(directory).close()
    assert caplog.records == []
    create(directory, {"v": np.ones(4, np.float32)}).close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "at version 0: its values replace this worker's own" in record.getMessage()
