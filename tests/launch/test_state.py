"""`launch.json`: what one launch leaves to the next."""

import os

import pytest

from springline.center import CenterError
from springline.launch.process import WorkerProcess
from springline.launch_state import LaunchState, WorkerEntry


def state(started, *workers, **values):
    return LaunchState("train.py", [], started, 1, list(workers), **values)


def test_what_is_written_is_read(tmp_path):
    written = state(7.0, WorkerEntry(0, starts=[5.0, 8.0]), earlier=[(4.0, 6.0)], ended=9.0)
    written.write(tmp_path)
    assert LaunchState.read(tmp_path) == written


def test_a_launch_counts_on(tmp_path):
    before = state(10.0, WorkerEntry(0, starts=[3.0, 11.0], restarts=1), WorkerEntry(1), ended=15.0)
    before.earlier = [(2.0, 5.0)]
    before.write(tmp_path)
    now = state(30.0, WorkerEntry(1), WorkerEntry(0), WorkerEntry(2))
    now.go_on(tmp_path)
    assert [worker.starts for worker in now.workers] == [[], [3.0, 11.0], []]
    assert [worker.restarts for worker in now.workers] == [0, 0, 0]
    assert now.launches == [2.0, 10.0, 30.0]
    assert now.seconds_before == 3 + 5


def test_a_launcher_that_was_killed_ended_when_it_was_last_seen(tmp_path):
    state(10.0).write(tmp_path)
    os.utime(tmp_path / "launch.json", (14, 14))
    now = state(30.0)
    now.go_on(tmp_path)
    assert now.earlier == [(10.0, 14.0)]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rank-1.jsonl").touch()
    os.utime(tmp_path / "metrics" / "rank-1.jsonl", (17, 17))
    now.go_on(tmp_path)
    assert now.earlier == [(10.0, 17.0)]


def test_without_an_earlier_launch_it_is_a_new_beginning(tmp_path):
    now = state(30.0, WorkerEntry(0))
    now.go_on(tmp_path)
    assert now == state(30.0, WorkerEntry(0))


@pytest.mark.parametrize("text", ["{", "[]", '{"script": "x"}'])
def test_a_damaged_one_is_no_new_beginning(tmp_path, text):
    """The run may be on a cluster."""
    (tmp_path / "launch.json").write_text(text)
    with pytest.raises(CenterError, match=r"launch\.json is cut short or damaged .* Remove it"):
        state(30.0).go_on(tmp_path)


@pytest.mark.parametrize("name", ["..", "../../x-01234567", "/etc", "", "digits"])
def test_the_name_of_a_center_reaches_no_other_place(tmp_path, name):
    state(1.0, center="digits-0123abcd").write(tmp_path)
    assert LaunchState.read(tmp_path).center == "digits-0123abcd"
    state(1.0, center=name).write(tmp_path)
    with pytest.raises(CenterError, match="is no name of a center"):
        LaunchState.read(tmp_path)


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    state(1.0).write(tmp_path)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(CenterError, match="it belongs to another user"):
        LaunchState.read(tmp_path)


def test_the_last_words_are_the_scripts_own(tmp_path):
    """TensorFlow's libraries often speak after it."""
    process = WorkerProcess(["script.py"], tmp_path, 0, {})
    process.log.parent.mkdir()
    process.log.write_text(
        "ValueError: no such thing\n"
        "W0000 00:00:1700000000.123456   12345 local_rendezvous.cc:412] Local rendezvous is abort\n"
        "2026-11-16 03:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations\n"
        "\n"
    )
    assert process.last_words() == "ValueError: no such thing"
    process.log.write_text("I0000 00:00:1700000000.123456   12345 cpu_utils.cc:24] nothing else\n")
    assert process.last_words() == ""
