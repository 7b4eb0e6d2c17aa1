"""Processes killed while they make, save or retire a center: the next start removes the rest."""

import os
import random
import signal
import time

import numpy as np
import pytest
from leftovers import VALUES, create, die_at, go_on, make_save_retire, no_wait_for_the_disk

from forks import fork
from springline.center.directory import memory_of
from springline.launch.clean import find_unused, free_all

KEPT = {"lock", "layout.json", "checkpoint.safetensors", "checkpoint-previous.safetensors"}
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _nobody_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", no_wait_for_the_disk)


def check_next_start(tmpfs, directory, elsewhere):
    """Start in another directory, then in the same: nothing is left that no center needs."""
    make_save_retire(elsewhere)
    left = [home / "center.memory" for home in tmpfs.iterdir()]
    assert left in ([], [memory_of(directory)])
    make_save_retire(directory)
    assert list(tmpfs.iterdir()) == []
    for place_ in (directory, elsewhere):
        assert {path.name for path in place_.iterdir()} <= KEPT
    with create(directory) as center:
        np.testing.assert_array_equal(center.values()["v"], VALUES["v"])
        center.retire()


@pytest.mark.parametrize("case", ["new", "saved", "full tmpfs"])
def test_a_kill_before_any_call_leaves_nothing_to_the_next_start(tmpfs, tmp_path, case):
    """Of all instants, those between two calls of the system are the ones that differ."""
    calls, instant = 1, 0
    while instant < calls:
        directory = tmp_path / f"run-{instant}"
        if case == "saved":
            make_save_retire(directory)
        process, pipe = fork(die_at, tmpfs, directory, instant, "full" in case)
        if instant == 0:  # it lives, and counts
            calls = pipe.recv()
        process.join(30)
        pipe.close()
        assert process.exitcode == (-signal.SIGKILL if instant else 0)
        check_next_start(tmpfs, directory, tmp_path / "elsewhere")
        instant += 1
    assert calls > 30


def kill_at_random(tmpfs, directory, instants):
    process, pipe = fork(go_on, tmpfs, directory)
    assert pipe.recv() == "begun"
    time.sleep(instants.uniform(0, 0.05))
    process.kill()
    process.join(30)
    pipe.close()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def instants():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)  # shown if the test fails
    return random.Random(seed)


@pytest.mark.parametrize("kills", [20, pytest.param(1000, marks=SLOW)])
def test_kills_leave_nothing_to_the_next_start(tmpfs, tmp_path, instants, kills):
    for kill in range(kills):
        directory = tmp_path / f"run-{kill % 5}"
        kill_at_random(tmpfs, directory, instants)
        check_next_start(tmpfs, directory, tmp_path / "elsewhere")


@pytest.mark.parametrize("kills", [20, pytest.param(1000, marks=SLOW)])
def test_kills_leave_nothing_to_clean(tmpfs, tmp_path, instants, kills):
    runs = [tmp_path / "runs" / str(kill) for kill in range(kills)]
    for run in runs:
        kill_at_random(tmpfs, run, instants)
    found = find_unused(tmp_path / "runs")
    assert found
    assert free_all(found)[1] == []
    assert find_unused(tmp_path / "runs") == []
    assert list(tmpfs.iterdir()) == []
    for run in runs:
        assert {path.name for path in run.glob("*")} <= KEPT  # it may not have come to make any
        with create(run) as center:
            np.testing.assert_array_equal(center.values()["v"], VALUES["v"])
            center.retire()
