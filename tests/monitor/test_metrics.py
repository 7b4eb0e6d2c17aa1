"""Metrics: whole lines only, each once, all incarnations of a rank."""

import math

import numpy as np
import pytest
from made import START, log

import springline
from springline.monitor.metrics import Line, LineReader, read_metrics


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics" / "rank-0.jsonl"


def add(file, text):
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as out:
        out.write(text)


def test_arrays_by_rank_and_name(tmp_path):
    log(tmp_path, 1, (0, 5, {"loss": 2.0}), (1, 10, {"loss": 1.5, "accuracy": 0.5}))
    log(tmp_path, 0, (2, 5, {"loss": None}))
    found = read_metrics(tmp_path)
    assert list(found) == [0, 1]
    assert found[1].time.tolist() == [START, START + 1]
    assert found[1].step.tolist() == [5, 10]
    np.testing.assert_array_equal(found[1].values["loss"], [2.0, 1.5])
    np.testing.assert_array_equal(found[1].values["accuracy"], [math.nan, 0.5])
    np.testing.assert_array_equal(found[0].values["loss"], [math.nan])


def test_a_last_line_cut_short_is_skipped(tmp_path, file):
    log(tmp_path, 0, (0, 1, {"loss": 3.0}))
    add(file, '{"time": 1700000001.0, "step": 2, "lo')
    assert read_metrics(tmp_path)[0].step.tolist() == [1]


def test_the_next_life_writes_on_behind_a_line_cut_short(tmp_path, file):
    log(tmp_path, 0, (0, 8, {"loss": 3.0}))
    add(file, '{"time": 1700000001.0, "step": 9, "lo')
    log(tmp_path, 0, (2, 5, {}), (3, 6, {"loss": 2.0}))
    series = read_metrics(tmp_path)[0]
    assert series.step.tolist() == [8, 5, 6]
    assert series.begins.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "text", ["", "not JSON", "7", "[1, 2]", '{"step": 1}', '{"time": "x", "step": 1}', "null"]
)
def test_what_is_no_line_is_skipped(file, tmp_path, text):
    add(file, text + "\n")
    log(tmp_path, 0, (0, 3, {"loss": 1.0}))
    assert [line.step for line in LineReader(file).read()] == [3]


def test_what_is_no_number_is_left_out():
    line = Line.parse(b'{"time": 1, "step": 2, "loss": 1, "note": "x", "done": true}')
    assert line == Line(1.0, 2, {"loss": 1.0})


def test_a_new_life_is_seen_by_its_first_line_or_by_its_steps(tmp_path):
    log(tmp_path, 0, (0, 0, {}), (1, 7, {"loss": 1.0}), (2, 5, {"loss": 1.0}), (3, 10, {}))
    assert read_metrics(tmp_path)[0].begins.tolist() == [False, False, True, True]


def test_a_clock_that_was_set_back_does_not_turn_time_around(tmp_path):
    log(tmp_path, 0, (5, 1, {"loss": 1.0}), (2, 2, {"loss": 1.0}), (6, 3, {"loss": 1.0}))
    assert (read_metrics(tmp_path)[0].time - START).tolist() == [5, 5, 6]


def test_no_metrics_at_all(tmp_path):
    assert read_metrics(tmp_path) == {}
    assert LineReader(tmp_path / "rank-0.jsonl").read() == []


def test_a_reader_returns_each_line_once_when_it_is_complete(tmp_path, file):
    reader = LineReader(file)
    assert reader.read() == []
    log(tmp_path, 0, (0, 1, {}), (1, 2, {}))
    assert [line.step for line in reader.read()] == [1, 2]
    add(file, '{"time": 1, "st')
    assert reader.read() == []
    add(file, 'ep": 3}\n{"time"')
    assert [line.step for line in reader.read()] == [3]
    assert reader.read() == []


def test_a_reader_does_not_read_again_what_it_has_read(tmp_path, file):
    log(tmp_path, 0, *((k, k, {"loss": 1.0}) for k in range(100)))
    reader = LineReader(file)
    reader.read()
    size = file.stat().st_size
    with file.open("r+b") as out:  # would be noticed if the beginning were read again
        out.write(b"#" * (size - 1))
    log(tmp_path, 0, (100, 100, {}))
    assert [line.step for line in reader.read()] == [100]


def test_a_reader_begins_anew_with_a_shorter_file(tmp_path, file):
    log(tmp_path, 0, (0, 1, {}), (1, 2, {}))
    reader = LineReader(file)
    reader.read()
    file.unlink()
    log(tmp_path, 0, (0, 7, {}))
    assert [line.step for line in reader.read()] == [7]


def test_the_tail_of_a_long_file(tmp_path, file):
    log(tmp_path, 0, *((k, k, {"loss": 1.0}) for k in range(1000)))
    lines = LineReader(file, tail=1000).read()
    assert 5 < len(lines) < 30
    assert [line.step for line in lines] == list(range(1000 - len(lines), 1000))


def test_what_a_script_logs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path))
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    worker = springline.Worker({"v": np.zeros(1)}, springline.ElasticAverage())
    for step in springline.steps(3):
        worker.step()
        springline.log(loss=1 / (step + 1), accuracy=math.inf)
    series = read_metrics(tmp_path)[1]
    assert series.step.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(series.values["loss"], [math.nan, 1, 1 / 2, 1 / 3])
    assert not np.isfinite(series.values["accuracy"]).any()
    assert (tmp_path / "total").read_text() == "3\n"
    assert (tmp_path / "total").stat().st_mode & 0o777 == 0o600


def test_a_life_begins_once_however_often_steps_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path))
    assert list(springline.steps(2)) == list(springline.steps(2)) == [0, 1]
    assert list(springline.steps(3)) == [0, 1, 2]
    assert read_metrics(tmp_path)[0].step.tolist() == [0]
    assert (tmp_path / "total").read_text() == "7\n"
