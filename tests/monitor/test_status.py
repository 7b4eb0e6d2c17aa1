"""The state of a run: whatever its directory holds, at every moment of its life."""

import math
import os
from functools import partial

import numpy as np
import pytest
from made import MODEL, NBYTES, START, center, count, launch, launcher_alive, log, read_status

from springline import AGN, AsyncDiLoCo, ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import CenterError, Layout
from springline.center.plan import Plan
from springline.launch_state import CenterStatus
from springline.monitor.sources import find_plan
from springline.monitor.status import NotARunError, StatusReader, WorkerStatus
from springline.rules import SGD
from springline.schedule import Warmup


@pytest.fixture
def reader(directory):
    reader = StatusReader(directory)
    yield reader
    reader.close()


def test_no_run(tmp_path):
    with pytest.raises(NotARunError, match=r"is not a run: it has no launch\.json") as error:
        read_status(tmp_path)
    assert isinstance(error.value, ValueError)
    with pytest.raises(NotARunError):
        read_status(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotARunError):
        read_status(tmp_path / "file")


@pytest.mark.parametrize("text", ["{", "[]", '{"script": "x"}'])
def test_a_damaged_launch_json(tmp_path, text):
    (tmp_path / "launch.json").write_text(text)
    with pytest.raises(CenterError, match=r"launch\.json is cut short or damaged"):
        read_status(tmp_path)


def test_a_damaged_layout_json(directory):
    center(directory).close()
    (directory / "center" / "layout.json").write_text('{"plan": {}}')
    with pytest.raises(CenterError, match=r"layout\.json is cut short or damaged"):
        read_status(directory)


def test_before_there_is_a_center(directory, clock):
    clock.now = 4
    launch(directory, "starting", "running")
    with launcher_alive(directory):
        status = read_status(directory)
    assert status.workers == (WorkerStatus(0, "starting"), WorkerStatus(1, "starting"))
    assert (status.settings, status.version, status.bytes_exchanged) == ({}, None, 0)
    assert (status.elapsed, status.checkpoint_age, status.total) == (4, None, None)
    assert not status.over


def test_a_worker_is_starting_until_it_joins_or_logs(directory, clock):
    """While its process imports what it needs, in each incarnation."""
    rule = ElasticAverage(period=10, workers=4)
    shared = center(directory, rule)
    count(shared, 3, steps=40, exchanges=4, seconds=0.1)  # it has left, and evaluates
    log(directory, 0, (1, 20, {"loss": 1.0}))
    log(directory, 1, (1, 20, {"loss": 1.0}), (3, 20, {}))
    starts = [[START, START + 2]] * 2 + [[START]] * 2
    launch(directory, *["running"] * 4, starts=starts, restarts=(1, 1))
    clock.now = 4
    reader = StatusReader(directory)
    with launcher_alive(directory):
        with Worker(MODEL, rule, shared, rank=2):
            states = [worker.state for worker in reader.read().workers]
        assert states == ["starting", "running", "running", "running"]
        assert reader.read().workers[2].state == "running"  # it has left, and logs nothing
    reader.close()


def test_a_run_without_a_launcher(directory):
    rule = ElasticAverage(period=5, workers=3)
    with Worker(MODEL, rule, directory / "center", rank=1) as worker:
        for _ in range(12):
            worker.step()
        status = read_status(directory)
        assert [w.state for w in status.workers] == ["starting", "running", "starting"]
        assert (status.workers[1].step, status.workers[1].exchanges) == (10, 2)
        assert status.workers[1].milliseconds > 0
        assert status.settings["rule"] == "elastic"
        assert (status.version, status.bytes_exchanged) == (2, worker.bytes_exchanged)
        assert not status.over
    status = read_status(directory)
    assert [w.state for w in status.workers] == ["starting", "left", "starting"]
    assert (status.workers[1].step, status.version, status.over) == (12, 3, True)


def test_a_rounds_bytes_are_those_of_all_its_workers(directory, together):
    rule = ModelAverage(period=1, workers=2)
    shared = center(directory, rule)

    def train(rank):
        with Worker(MODEL, rule, shared, rank) as worker:
            for _ in range(3):
                worker.step()

    together(lambda: train(0), lambda: train(1))
    status = read_status(directory)
    assert (status.version, status.bytes_exchanged) == (3, 2 * NBYTES * 6)
    shared.close()


def test_steps_come_from_the_center_or_a_newer_line(directory, clock):
    shared = center(directory)
    count(shared, 0, steps=20, exchanges=2, seconds=0.1)
    count(shared, 1, steps=30, exchanges=3, seconds=0.1)
    log(directory, 0, (0, 24, {"loss": 1.0}))
    log(directory, 1, (0, 24, {"loss": 1.0}))
    assert [worker.step for worker in read_status(directory).workers] == [24, 30]
    shared.close()


def test_steps_per_second_from_the_lines(directory, clock):
    log(directory, 0, *((k / 10, 5 * k, {"loss": 1.0}) for k in range(100)))
    log(directory, 1, (0.0, 7, {"loss": 1.0}))
    launch(directory, "running", "running")
    clock.now = 10
    with launcher_alive(directory):
        workers = read_status(directory).workers
    assert workers[0].rate == pytest.approx(50)
    assert workers[1].rate is None


def test_steps_per_second_from_the_center(directory, reader, clock):
    shared = center(directory)
    launch(directory, "running", "running")
    with launcher_alive(directory):
        for clock.now in range(10):
            count(shared, 0, steps=20 * clock.now, exchanges=2 * clock.now, seconds=0.0)
            status = reader.read()
    assert status.workers[0].rate == pytest.approx(20)
    shared.close()


def test_a_worker_that_stands_still_makes_no_steps_per_second(directory, reader, clock):
    launch(directory, "running")
    log(directory, 0, *((k / 2, k, {"loss": 1.0}) for k in range(20)))
    with launcher_alive(directory):
        clock.now = 10
        assert reader.read().workers[0].rate == 2
        clock.now = 20
        assert reader.read().workers[0].rate == 0


@pytest.mark.parametrize("state", ["restarting", "finished", "failed", "stopped"])
def test_who_does_not_run_has_no_rate(directory, clock, state):
    log(directory, 0, *((k / 2, k, {"loss": 1.0}) for k in range(20)))
    clock.now = 10
    launch(directory, state)
    with launcher_alive(directory):
        assert read_status(directory).workers[0].rate is None
    launch(directory, state, ended=START + 10)
    assert read_status(directory).workers[0].rate is None


def test_an_earlier_launch_has_no_part_in_the_rate_but_in_the_time(directory, clock):
    log(directory, 0, *((k, k, {"loss": 1.0}) for k in range(-13, -3)))
    launch(directory, "running", earlier=[(START - 100, START - 90), (START - 20, START - 3)])
    clock.now = 1
    with launcher_alive(directory):
        status = read_status(directory)
    assert status.workers[0].rate is None
    assert status.elapsed == 10 + 17 + 1
    launch(directory, "finished", ended=START + 5, earlier=[(START - 20, START - 3)])
    assert read_status(directory).elapsed == 17 + 5


def test_a_new_life_has_a_rate_of_its_own(directory, reader, clock):
    launch(directory, "running")
    log(directory, 0, (0, 0, {}), (1, 100, {"loss": 1.0}))
    with launcher_alive(directory):
        clock.now = 1
        assert reader.read().workers[0].rate == 100
        log(directory, 0, (500, 100, {}), (502, 110, {"loss": 1.0}))
        clock.now = 502
        assert reader.read().workers[0].rate == 5


def test_milliseconds_per_exchange_are_recent_ones(directory, reader, clock):
    shared = center(directory)
    for clock.now in range(20):
        slow = max(0, clock.now - 10)
        seconds = 0.010 * (clock.now - slow) + 0.250 * slow
        count(shared, 0, steps=10 * clock.now, exchanges=clock.now, seconds=seconds)
        status = reader.read()
        if clock.now == 8:
            assert status.workers[0].milliseconds == pytest.approx(10)
    assert status.workers[0].milliseconds == pytest.approx(250)
    assert read_status(directory).workers[0].milliseconds == pytest.approx(1000 * seconds / 19)
    shared.close()


def test_the_last_evaluations_of_the_run(directory):
    log(directory, 0, (0, 1, {"val_loss": 3.0, "val_accuracy": 0.1}), (1, 2, {"loss": 2.5}))
    log(directory, 1, (2, 3, {"val_loss": 2.0, "value": 1.0}), (3, 4, {"center_loss": None}))
    launch(directory, "running", "running")
    found = read_status(directory).evaluations
    assert {name: (last.step, last.value) for name, last in found.items() if last.time} == {
        "val_loss": (3, 2.0),
        "val_accuracy": (1, 0.1),
        "center_loss": (4, pytest.approx(math.nan, nan_ok=True)),
    }


def test_the_last_loss(directory):
    log(directory, 0, (0, 1, {"loss": 3.0}), (1, 2, {"loss": 2.5}), (2, 3, {"val_loss": 9.0}))
    log(directory, 1, (0, 1, {"loss": 3.0}), (1, 2, {"loss": None}))
    log(directory, 2, (0, 1, {"accuracy": 0.5}))
    losses = [worker.loss for worker in read_status(directory).workers]
    assert losses[0] == 2.5
    assert math.isnan(losses[1])
    assert losses[2] is None


def test_what_the_launcher_knows(directory, clock):
    launch(
        directory,
        "restarting",
        "failed",
        "running",
        restarts=(2, 4),
        checkpoint=START + 5,
        ended=None,
    )
    log(directory, 2, (1, 1, {}))
    clock.now = 12
    with launcher_alive(directory):
        status = read_status(directory)
    assert [w.state for w in status.workers] == ["restarting", "failed", "running"]
    assert [w.restarts for w in status.workers] == [2, 4, 0]
    assert status.checkpoint_age == 7
    assert not status.over


def test_a_launcher_that_was_killed(directory, clock):
    launch(directory, "running", "finished", "running")
    log(directory, 0, (3, 1, {"loss": 1.0}))
    clock.now = 1000
    shared = center(directory, ElasticAverage(period=10, workers=3))
    with Worker(MODEL, ElasticAverage(period=10, workers=3), shared, rank=2):
        status = read_status(directory)
        assert [w.state for w in status.workers] == ["left", "finished", "running"]
        assert (status.over, status.elapsed) == (False, 1000)
    status = read_status(directory)
    assert (status.over, status.elapsed) == (True, 3)


def test_the_end(directory, clock):
    launch(directory, "finished", ended=START + 60)
    clock.now = 5000
    status = read_status(directory)
    assert (status.over, status.elapsed) == (True, 60)


def test_the_checkpoints_age_without_a_launcher(directory, clock):
    shared = center(directory)
    shared.save()
    os.utime(directory / "center" / "checkpoint.safetensors", (START + 3, START + 3))
    clock.now = 10
    assert read_status(directory).checkpoint_age == 7
    shared.close()


@pytest.mark.parametrize("rule", [ElasticAverage, ModelAverage, partial(AGN, outer=SGD(0.1))])
def test_after_the_centers_memory_is_gone(directory, reader, rule):
    shared = center(directory, rule(period=10, workers=2))
    for rank in (0, 1):
        count(shared, rank, steps=35, exchanges=4, seconds=0.8)
    if rule is ModelAverage:
        shared.memory.head[0] = shared.memory.reduced[:] = 4  # rounds, reduced
    before = reader.read()
    shared.retire()
    after, fresh = reader.read(), read_status(directory)
    assert after.workers[0].milliseconds == before.workers[0].milliseconds == 200
    assert fresh.workers[0].milliseconds is None
    for status in (before, after, fresh):
        assert [(w.step, w.exchanges) for w in status.workers] == [(35, 4), (35, 4)]
        assert status.version == (4 if rule is ModelAverage else 8)
        assert status.bytes_exchanged == 2 * NBYTES * 8
        assert status.settings["workers"] == 2
        assert status.over


def test_a_center_that_went_on_from_its_checkpoint(directory, reader):
    shared = center(directory)
    count(shared, 0, steps=50, exchanges=5, seconds=0.1)
    reader.read()
    shared.retire()
    reader.read()
    shared = center(directory)
    status = reader.read()
    assert (status.workers[0].step, status.workers[0].exchanges, status.version) == (50, 5, 5)
    count(shared, 0, steps=70, exchanges=2, seconds=0.1)
    status = reader.read()
    assert (status.workers[0].step, status.workers[0].exchanges, status.version) == (70, 7, 7)
    assert status.bytes_exchanged == 2 * NBYTES * 7
    shared.close()


def test_the_memory_was_lost_without_a_checkpoint(directory, reader):
    shared = center(directory)
    count(shared, 0, steps=50, exchanges=5, seconds=0.1)
    assert reader.read().version == 5
    shared._path.unlink()
    assert reader.read().version == 5
    status = read_status(directory)
    assert (status.version, status.settings["period"]) == (None, 10)
    shared.close()


def test_the_total_that_a_script_told(directory, clock):
    launch(directory, "running")
    total = directory / "total"
    total.write_text("400\n")
    assert read_status(directory).total == 400
    os.utime(total, (START - 1, START - 1))  # of an earlier start in the directory
    assert read_status(directory).total is None
    total.write_text("")
    assert read_status(directory).total is None


def tell_members(pipe, place):
    with SharedCenter.open(place) as center:
        pipe.send(center.members())


def test_watching_leaves_the_locks_of_this_process_alone(directory, start):
    # Closing any descriptor of a lock file drops all record locks of the process.
    rule = ElasticAverage(period=10, workers=2)
    with Worker(MODEL, rule, directory / "center", rank=1), launcher_alive(directory):
        launch(directory, "running", "running")
        assert not read_status(directory).over
        _, pipe = start(tell_members, directory / "center")
        assert pipe.recv() == [1]
        assert not read_status(directory).over


def test_a_center_on_a_cluster_is_what_its_launcher_wrote_down(tmp_path):
    rule = ElasticAverage(period=10, workers=2)
    plan = Plan.of(Layout.of(MODEL), rule, use_locking=True)
    launch(tmp_path, "running", "running")
    CenterStatus(plan, 7, [0, 1], [(40, 4, 0.5), (30, 3, 0.25)]).write(tmp_path / "center")
    with launcher_alive(tmp_path):
        status = read_status(tmp_path)
    assert not status.over
    assert status.version == 7
    assert status.settings["rule"] == "elastic"
    assert status.bytes_exchanged == 2 * 7 * NBYTES
    assert [(w.step, w.exchanges) for w in status.workers] == [(40, 4), (30, 3)]
    assert find_plan(tmp_path / "center") == plan

    status = read_status(tmp_path)  # the launcher was killed: who is a member is not known
    assert status.over
    assert [w.state for w in status.workers] == ["left", "left"]
    assert status.version == 7


def test_an_exchange_of_fragments_counts_their_bytes(directory):
    model = {"v": np.zeros(1024, np.float32), "w": np.zeros(1024, np.float32)}
    rule = AsyncDiLoCo(period=4, fragments=2)
    with Worker(model, rule, directory / "center") as worker:
        for _ in range(8):
            worker.step()
        status = read_status(directory)
        assert (status.version, status.workers[0].exchanges) == (4, 4)
        assert status.bytes_exchanged == worker.bytes_exchanged == 2 * 2 * 2 * 4096


@pytest.mark.parametrize("rounds", [True, False])
def test_exchanges_before_a_checkpoint_under_a_schedule(directory, reader, rounds):
    kind = ModelAverage if rounds else ElasticAverage
    rule = kind(period=Warmup(5, then=10), workers=2)
    shared = center(directory, rule)
    for rank, (steps, exchanges) in enumerate([(35, 8), (15, 6)]):
        count(shared, rank, steps=steps, exchanges=exchanges, seconds=0.8)
    if rounds:
        shared.memory.head[0] = shared.memory.reduced[:] = 8
    assert [w.exchanges for w in reader.read().workers] == [8, 6]
    shared.retire()
    status = read_status(directory)
    assert [w.exchanges for w in status.workers] == ([8, 8] if rounds else [10, 4])
    assert status.bytes_exchanged == 2 * NBYTES * (16 if rounds else 14)


def test_exchanges_before_a_checkpoint_with_fragments(directory):
    rule = ElasticAverage(period=10, workers=1, fragments=[["v"], ["w"]])
    model = {"v": np.zeros(16, np.float32), "w": np.zeros(16, np.float32)}
    with Worker(model, rule, directory / "center") as worker:
        for _ in range(30):
            worker.step()
    worker.center.retire()
    assert read_status(directory).workers[0].exchanges == 6
