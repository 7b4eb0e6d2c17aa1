"""Interrupts at random instants, caught by the script, leave no lock held and nothing half done."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interrupted import READY, SEEN, WORKERS, open_board

SCRIPT = Path(__file__).with_name("interrupted.py")
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE = 20.0


@pytest.fixture
def interrupted(tmp_path):
    """`interrupted(rule, locking, ranks)` starts the scripts; an empty rank is one alone."""
    processes = []

    def begin(rule, locking, ranks):
        (tmp_path / "board").write_bytes(bytes(8 * 2 * WORKERS))
        for rank in ranks:
            command = [sys.executable, SCRIPT, tmp_path, rule, str(locking), *rank]
            processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(what, processes, condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, what
        time.sleep(0.0005)


@pytest.mark.parametrize("count", [17, pytest.param(168, marks=SLOW)])
@pytest.mark.parametrize("ranks", [[""], ["0", "1"]], ids=["alone", "shared"])
@pytest.mark.parametrize("locking", [True, False], ids=["locked", "unlocked"])
@pytest.mark.parametrize("rule", ["elastic", "average", "agn"])
def test_interrupts(rule, locking, ranks, count, interrupted, directory, tmp_path):
    """204 interrupts over the rules, with and without others; 2,016 in the slow run."""
    processes = interrupted(rule, locking, [[r] if r else [] for r in ranks])
    board, instants = open_board(tmp_path), random.SystemRandom()
    for n in range(count):
        rank = n % len(ranks)
        row = board[rank]
        wait_for("nobody trains", processes, lambda row=row: row[READY] > row[SEEN])
        seen = row[SEEN].copy()
        time.sleep(instants.uniform(0, 0.02))
        os.kill(processes[rank].pid, signal.SIGINT)
        hangs = f"rank {rank} hangs after interrupt {n}"
        wait_for(hangs, processes, lambda row=row, seen=seen: row[SEEN] > seen)
    (tmp_path / "stop").touch()
    for process in processes:
        assert process.wait(PATIENCE) == 0, process.communicate()[1]
