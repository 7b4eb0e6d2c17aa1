"""A signal's handler runs while an exchange waits for others, on every center."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from remote import worker
from springline import AGN, ElasticAverage
from springline.center.remote.peer import NotHereError
from springline.rules import SGD

VALUES = {"w": np.zeros(10, np.float32)}
RULE = ElasticAverage(workers=2, period=1, moving_rate=0.25)


class InterruptedForTestError(Exception):
    """What the handler raises."""


@pytest.fixture
def interrupt():
    """`interrupt()` lets a handler raise in half a second."""

    def raise_it(number, frame):
        raise InterruptedForTestError

    before = signal.signal(signal.SIGUSR1, raise_it)
    timers = []

    def interrupt():
        timers.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)))
        timers[-1].start()

    yield interrupt
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


class Never:
    """An answer that does not come."""

    def result(self, timeout):
        time.sleep(min(timeout or 0.05, 0.05))
        raise NotHereError


@pytest.mark.parametrize("rule", [RULE, AGN(workers=2, period=1, outer=SGD(1.0))])
def test_a_remote_center(serve, rule, interrupt, monkeypatch):
    service = serve(rule, shards=1)
    one = worker(service, rule, timeout=None)
    monkeypatch.setattr(service.shards[0], "ask", lambda *call: Never())
    one.observe(VALUES)
    interrupt()
    with pytest.raises(InterruptedForTestError):
        one.exchange()
    monkeypatch.undo()


GROUP = """
import os, signal, sys, threading, time
import numpy as np
sys.path.insert(0, {folder!r})
from collective_ranks import RULES, make, start
rank = int(sys.argv[1])
start(rank, 2, sys.argv[2])
worker = make(rank, 2, RULES["average"](workers=2, period=1), {{"w": np.zeros(10, np.float32)}},
              timeout=60.0)
if rank:
    time.sleep(30)
    os._exit(0)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
begun = time.monotonic()
try:
    worker.step()
except KeyboardInterrupt:
    print("interrupted", "at once" if time.monotonic() - begun < 20 else "late", flush=True)
os._exit(0)
"""


def test_a_process_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GROUP.format(folder=str(Path(__file__).parent)))
    command = [sys.executable, str(script)]
    path = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    store = str(tmp_path / "store")
    other = subprocess.Popen([*command, "1", store], env=env)
    try:
        first = subprocess.run(
            [*command, "0", store], env=env, capture_output=True, text=True, timeout=120, check=True
        )
    finally:
        other.kill()
        other.wait()
    assert first.stdout == "interrupted at once\n"
