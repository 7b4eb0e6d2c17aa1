"""Run directories made by hand, for those who look at them."""

import json
from contextlib import closing, contextmanager

import numpy as np

from springline import ElasticAverage, SharedCenter
from springline.center import Layout
from springline.center.locks import RecordLocks
from springline.center.plan import EXCHANGES, NANOSECONDS, STEPS
from springline.launch_state import LaunchState, WorkerEntry
from springline.monitor.status import StatusReader

START = 1_700_000_000.0
MODEL = {"w": np.zeros((50, 5), np.float32)}  # 1000 bytes, 1024 with their alignment
NBYTES = Layout.of(MODEL).nbytes


def log(run, rank, *lines):
    """Add lines (seconds since START, step, values) to a rank's metrics."""
    (run / "metrics").mkdir(parents=True, exist_ok=True)
    with (run / "metrics" / f"rank-{rank}.jsonl").open("a") as file:
        for seconds, step, values in lines:
            file.write(json.dumps({"time": START + seconds, "step": step, **values}) + "\n")


def launch(run, *states, restarts=(), starts=(), started=START, **values):
    """Write launch.json, with workers in these states."""
    run.mkdir(parents=True, exist_ok=True)
    workers = [WorkerEntry(rank, state) for rank, state in enumerate(states)]
    for worker, count in zip(workers, restarts, strict=False):
        worker.restarts = count
    for worker, times in zip(workers, starts, strict=False):
        worker.starts = times
    LaunchState("train.py", [], started, 1, workers, **values).write(run)


@contextmanager
def launcher_alive(run):
    """Hold what a launcher holds for as long as it lives."""
    run.mkdir(parents=True, exist_ok=True)
    lock = RecordLocks(run / "lock")
    lock.try_acquire(0)
    try:
        yield
    finally:
        lock.close()


def center(run, rule=None):
    """Make a run's center, elastic for two workers unless a rule is given."""
    rule = rule or ElasticAverage(period=10, workers=2)
    return SharedCenter.create_or_join(run / "center", Layout.of(MODEL), rule, MODEL)


def count(center, rank, steps, exchanges, seconds):
    """Set a rank's counters, as if it had exchanged."""
    row = center.memory.ranks[rank]
    row[STEPS], row[EXCHANGES], row[NANOSECONDS] = steps, exchanges, round(1e9 * seconds)


def read_status(run):
    """Read the state of a run once."""
    with closing(StatusReader(run)) as reader:
        return reader.read()
