"""Fixtures of the suites of served centers."""

import itertools
import os
import pickle
import signal
import subprocess
import sys

import pytest

from served import Service
from springline.center import Layout
from springline.center.served.near import Ring

LENDER = """
import os, pickle, sys, time
import numpy as np
from springline.center.served.near import Ring
ring = Ring()
for slot in ring.slots:
    slot.view(np.float32)[:] = 4
ring.open()
for _ in range(int(sys.argv[1])):
    ring.say()
sys.stdout.buffer.write(pickle.dumps(ring.address))
sys.stdout.flush()
if len(sys.argv) > 2:
    os.fork()  # a child that has the pipes, too
time.sleep(600)
"""


@pytest.fixture
def serve(request, monkeypatch):
    """`serve(rule, values, buffers)` makes a center in this process; by default of `VALUES`."""
    monkeypatch.setattr("springline.center.served.peer._PAUSE", 0.001)
    monkeypatch.setattr("springline.center.served.stream._LOOK", 0.05)
    services = []

    def serve(rule=None, values=None, buffers=None, **options):
        rule = rule or request.module.RULE
        values = request.module.VALUES if values is None else values
        given = Layout.of(values, buffers), rule, values | (buffers or {})
        options = {"use_locking": True, "restore": None, "shards": 2} | options
        services.append(Service(*given, **options))
        return services[-1]

    yield serve
    for service in services:
        service.close()


@pytest.fixture
def small(monkeypatch):
    """Small parts go through memory, too, a block at a time."""
    monkeypatch.setattr("springline.center.served.near.SMALL", 0)
    monkeypatch.setattr("springline.center.served.near.SLOT", 2**18)


@pytest.fixture
def calls(monkeypatch):
    """A shard that has stayed in a worker's memory is called to every other exchange."""
    tell, turn = Ring.ask, itertools.count()
    monkeypatch.setattr(Ring, "ask", lambda *arguments: next(turn) % 2 and tell(*arguments))


@pytest.fixture
def lend():
    """Start workers that send some pieces and then do nothing."""
    started = []

    def lend(pieces, *options):
        command = [sys.executable, "-c", LENDER, str(pieces), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        with process.stdout:
            return process, pickle.load(process.stdout)

    yield lend
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
