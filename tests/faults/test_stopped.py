"""Workers that are stopped in the middle of an exchange: nobody hangs, and everybody says why."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from springline import AGN, ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import RankError, RoundTimeoutError
from springline.center.asynchronous import Asynchronous
from springline.center.plan import LEFT_OUT
from springline.launch.export import export
from springline.rules import SGD

SIZE = 2_000_000
VALUES = {"v": np.zeros(SIZE, np.float32)}
RULES = {
    "elastic": ElasticAverage(workers=2, period=1, moving_rate=0.5),
    "agn": AGN(workers=2, period=1, outer=SGD(1.0)),
    "average": ModelAverage(workers=2, period=1),
}
GRADIENTS = {"v": np.ones(SIZE, np.float32)}


def stop_in_an_exchange(pipe, directory, name):
    """Exchange, and be stopped by SIGSTOP in the middle of it, with a lock held."""
    worker = Worker(VALUES, RULES[name], directory, 1, synchronous=False)
    swap = Asynchronous._swap

    def stopping(exchanges, block, side):
        os.kill(os.getpid(), signal.SIGSTOP)
        Asynchronous._swap = swap
        return swap(exchanges, block, side)

    Asynchronous._swap = stopping
    pipe.send("ready")
    pipe.recv()
    worker.observe(GRADIENTS)
    worker.exchange()
    pipe.send("exchanged")
    pipe.recv()


def is_stopped(process):
    text = Path(f"/proc/{process.pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def stopped(directory, start):
    """`stopped(rule)` is a process that holds a part of the center and does not run."""

    def stopped(name):
        process, pipe = start(stop_in_an_exchange, directory, name)
        assert pipe.recv() == "ready"
        pipe.send("go")
        deadline = time.monotonic() + 20
        while not is_stopped(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process, pipe

    return stopped


@pytest.mark.parametrize("name", ["elastic", "agn"])
def test_others_exchange_without_the_part_that_a_stopped_worker_has_locked(
    directory, stopped, name, caplog
):
    worker = Worker(VALUES, RULES[name], directory, 0)
    process, pipe = stopped(name)
    shards = len(worker.center.plan.shards)
    for exchange in range(1, 4):
        worker.observe(GRADIENTS)
        worker.parameters["v"][:] = exchange
        worker.exchange()
        assert worker.center.left_out == worker.member.row[LEFT_OUT] == exchange
    c = worker.center.memory.center.view(np.float32)
    assert (c != 0).mean() == pytest.approx(1 - 1 / shards, abs=0.02)
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith(f"1 of {shards} parts of the center are left out")
    assert f"rank 1 (process {process.pid}, stopped)" in said
    os.kill(process.pid, signal.SIGCONT)
    assert pipe.recv() == "exchanged"
    worker.observe(GRADIENTS)
    worker.exchange()
    assert worker.center.left_out == 3
    assert (worker.center.values()["v"] != 0).all()
    worker.center.close()


def test_a_timeout_holds_for_locks_too(directory, stopped, tmp_path):
    worker = Worker(VALUES, RULES["elastic"], directory, 0, timeout=0.2)
    worker.center.save()
    process, _ = stopped("elastic")
    words = rf"Waited 0.2 s for part \d+ of the center; missing: rank 1 \(process {process.pid}"
    for call in (worker.take_center, worker.center.values, worker.center.save):
        with pytest.raises(RoundTimeoutError, match=words):
            call()
    worker.center.close()


def test_export_does_not_hang_behind_a_stopped_worker(directory, stopped, tmp_path, monkeypatch):
    monkeypatch.setattr("springline.launch.export.PATIENCE", 0.2)
    with Worker(VALUES, RULES["elastic"], directory, 0) as worker:
        worker.center.save()
        process, _ = stopped("elastic")
        source = export(directory, tmp_path / "out.safetensors")
        assert "version 0 of" in source
        assert f"rank 1 (process {process.pid}, stopped)" in source
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def test_who_waits_for_a_round_says_what_the_missing_one_is_doing(directory, start):
    worker = Worker(VALUES, RULES["average"], directory, 0, synchronous=False, timeout=0.5)
    process, pipe = start(stop_in_an_exchange, directory, "average")
    assert pipe.recv() == "ready"
    os.kill(process.pid, signal.SIGSTOP)
    words = rf"Waited 0.5 s for round 1; missing: rank 1 \(process {process.pid}, stopped\)"
    with pytest.raises(RoundTimeoutError, match=words):
        worker.exchange()
    process.kill()
    process.join()
    worker.exchange()
    worker.center.close()


def copy_all(pipe, directory, target):
    """Read all files of the run, as a logger of artifacts does, in the worker's own process."""
    worker = Worker({"v": np.zeros(4)}, RULES["elastic"], directory, 0)
    shutil.copytree(directory, target)
    (directory / "lock").read_bytes()
    pipe.send("copied")
    pipe.recv()
    worker.exchange()
    worker.finish()
    pipe.send("done")


def test_reading_the_run_directory_costs_a_worker_neither_its_rank_nor_a_lock(
    directory, start, tmp_path
):
    _, pipe = start(copy_all, directory, tmp_path / "copy")
    assert pipe.recv() == "copied"
    with SharedCenter.open(directory) as center:
        assert center.members() == [0]
        with pytest.raises(RankError, match="Rank 0 is in use"):
            center.join(0, RULES["elastic"])
        pipe.send("go on")
        assert pipe.recv() == "done"
        assert center.members() == []
