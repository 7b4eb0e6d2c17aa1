"""Processes that are killed while they make, save or retire a center; without pytest.

Each is forked from one that has imported what they need, and imports no more than this file.
"""

import os
import signal
import sys

import numpy as np

from springline import ElasticAverage, SharedCenter
from springline.center import Layout, memory_file

RULE = ElasticAverage(workers=1, period=1, moving_rate=0.5)
VALUES = {"v": np.arange(1 << 14, dtype=np.float32)}


def create(directory):
    return SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES)


def make_save_retire(directory):
    center = create(directory)
    center.save()
    center.retire()


def no_wait_for_the_disk(_):
    """Stand for `os.fsync`: it matters to a machine that loses its power, not to a kill."""


def die_at(pipe, tmpfs, directory, instant, full):
    """Kill ourselves before the call number `instant` that the system is asked for, if any."""
    memory_file.TMPFS, os.fsync = tmpfs, no_wait_for_the_disk
    if full:
        room = os.statvfs
        os.statvfs = lambda path: room("/proc" if path == tmpfs else path)
    calls = 0

    def count(event, _):
        nonlocal calls
        if event.startswith(("open", "os.", "fcntl.", "mmap.", "tempfile.")):
            calls += 1
            if calls == instant:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    make_save_retire(directory)
    pipe.send(calls)


def go_on(pipe, tmpfs, directory):
    """Make, save and retire, until somebody kills us."""
    memory_file.TMPFS, os.fsync = tmpfs, no_wait_for_the_disk
    pipe.send("begun")
    while True:
        make_save_retire(directory)
