"""Where shards keep checkpoints: the last good one always survives."""

import stat
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from remote import Service
from springline import ElasticAverage, Worker
from springline.center import CheckpointError, Layout
from springline.center.remote.checkpoints import Checkpoints
from springline.center.remote.storage import Storage
from springline.launch.export import export

TENSORS = {"center": np.arange(1000, dtype=np.uint8), "state": np.zeros(0, np.uint8)}


@pytest.fixture(params=["directory", "url"])
def place(request, tmp_path):
    folder = tmp_path / "store"
    return str(folder) if request.param == "directory" else f"file://{folder}"


def slots(tmp_path):
    return sorted((tmp_path / "store").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_the_newest_is_read_back(place):
    storage = Storage(place)
    assert storage.read("shard-0") is None
    for number in range(5):
        tensors = TENSORS | {"center": TENSORS["center"] + np.uint8(number)}
        storage.write("shard-0", {"round": number}, tensors)
        header, found = Storage(place).read("shard-0")
        assert header == {"round": number}
        assert found.keys() == TENSORS.keys()
        np.testing.assert_array_equal(found["center"], tensors["center"])


def test_another_process_writes_over_the_older_one(place, tmp_path):
    for number in range(4):
        Storage(place).write("head", {"number": number})
        assert len(slots(tmp_path)) == min(number + 1, 2)
    assert Storage(place).read("head") == ({"number": 3}, {})


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_one_that_was_cut_short_is_passed_over(place, damage, tmp_path):
    storage = Storage(place)
    for number in range(2):
        storage.write("shard-1", {"round": number}, TENSORS)
    newest = slots(tmp_path)[-1]
    data = bytearray(newest.read_bytes())
    if damage == "flip":
        data[data.rindex(bytes(TENSORS["center"][:8]))] ^= 1
    newest.write_bytes({"cut": data[:-5], "flip": data, "empty": b""}[damage])
    header, _ = Storage(place).read("shard-1")
    assert header == {"round": 0}
    Storage(place).write("shard-1", {"round": 2}, TENSORS)  # over the damaged one
    header, _ = Storage(place).read("shard-1")
    assert header == {"round": 2}


def test_files_are_the_users_own(tmp_path):
    Storage(str(tmp_path / "store")).write("shard-0", {}, TENSORS)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in slots(tmp_path)] == [0o600]


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_place_that_cannot_be_used_is_named(prefix, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Cannot use .*file/store for the center's"):
        Storage(f"{prefix}{tmp_path / 'file' / 'store'}")


def test_a_url_without_fsspec_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"pip install springline\[ray\]"):
        Storage("s3://bucket/run")


def test_an_unknown_protocol_is_refused():
    with pytest.raises(CheckpointError, match="Cannot use nowhere://bucket"):
        Storage("nowhere://bucket")


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Storage("store").write("head", {"a": 1})
    assert Storage(str(Path.cwd() / "store")).read("head") == ({"a": 1}, {})


def test_a_center_can_be_taken_out_of_its_storage(tmp_path):
    """Though its run's directory is gone."""
    values = {"w": np.arange(300_000, dtype=np.float32), "b": np.ones(3, np.float64)}
    rule = ElasticAverage(period=1, moving_rate=0.5)
    place = tmp_path / "store"
    service = Service(Layout.of(values), rule, values, True, None, storage=str(place))
    worker = Worker(values, rule, service.open())
    worker.parameters["b"] += 2
    worker.exchange()
    worker.finish()
    for peer in service.shards:
        peer.target.save()
    service.close()
    export(str(place), tmp_path / "center.safetensors")
    found = load_file(tmp_path / "center.safetensors")
    np.testing.assert_array_equal(found["w"], values["w"])
    np.testing.assert_array_equal(found["b"], 2)
    (place / "shard-1.0.safetensors").unlink()
    (place / "shard-1.1.safetensors").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="no whole checkpoint of shard 1 in"):
        export(str(place), tmp_path / "other.safetensors")


def test_an_earlier_epoch_does_not_write_over_a_later_one(place):
    """It is cut off, and does not know that another has gone on from its checkpoint."""
    earlier = Storage(place)
    earlier.write("shard-0", {"round": 1}, TENSORS)
    later = Storage(place)
    assert later.read("shard-0")[0] == {"round": 1}
    earlier.write("shard-0", {"round": 2}, TENSORS)  # as nobody has written since
    for number in range(3, 6):
        later.write("shard-0", {"round": number}, TENSORS)
        with pytest.raises(CheckpointError, match="Another process has restored"):
            earlier.write("shard-0", {"round": 100}, TENSORS)
        assert Storage(place).read("shard-0")[0] == {"round": number}


def test_a_fenced_writer_reports_it_once_and_stops(place, caplog):
    earlier = Checkpoints("shard-0", place, (1, 0.01), lambda: ({"round": 1}, TENSORS))
    earlier.save()
    later = Storage(place)
    later.read("shard-0")
    later.write("shard-0", {"round": 2}, TENSORS)
    *_, thread = [t for t in threading.enumerate() if t.name == "checkpoints of shard-0"]
    earlier.count()
    thread.join(30)
    assert not thread.is_alive()
    assert [
        r.getMessage() for r in caplog.records if "Another process has restored" in r.getMessage()
    ]
    assert Storage(place).read("shard-0")[0] == {"round": 2}


def test_a_later_epoch_is_later_whatever_its_clock_says(place, monkeypatch):
    earlier = Storage(place)
    earlier.write("shard-0", {"round": 1})
    monkeypatch.setattr("time.time_ns", lambda: 5)
    later = Storage(place)
    later.read("shard-0")
    later.write("shard-0", {"round": 2})
    with pytest.raises(CheckpointError, match="Another process has restored"):
        earlier.write("shard-0", {"round": 3})
    assert Storage(place).read("shard-0")[0] == {"round": 2}


def test_one_without_a_whole_slot_is_named(place, tmp_path):
    Storage(place).write("head", {"number": 1})
    (slot,) = slots(tmp_path)
    data = bytearray(slot.read_bytes())
    data[data.rindex(b"number")] ^= 1  # in the JSON
    slot.write_bytes(data)
    for attempt in (lambda s: s.read("head"), lambda s: s.write("head", {})):  # not over it, either
        with pytest.raises(CheckpointError, match=r"head\.1\.safetensors is cut short or damaged"):
            attempt(Storage(place))
    slot.unlink()
    Storage(place).write("head", {"number": 2})
    assert Storage(place).read("head") == ({"number": 2}, {})
