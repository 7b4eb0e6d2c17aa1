"""Fixtures that several suites share: places for centers, real processes, threads."""

import contextlib
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

for library in ("OPENBLAS", "OMP"):  # before numpy is imported, here and in every process we start
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Started by nohup, or in the background by a shell, we would hand these on to every process as
# ignored, and none could be stopped by them.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from forks import fork  # noqa: E402
from springline import progress  # noqa: E402
from springline.center import memory_file  # noqa: E402

collect_ignore_glob = ["conftest.py", "*/conftest.py"]  # they hold no doctests
settings.register_profile("springline", deadline=None)  # a busy machine is no error
settings.load_profile("springline")


def memories_below(path):
    """The memories in the tmpfs of centers whose directory is `path` or below it."""
    found = []
    for home in memory_file.TMPFS.glob("springline-*"):
        with contextlib.suppress(OSError):  # other runs come and go
            owner = Path((home / "run").read_text())
            if path == owner or path in owner.parents:
                found.append(home)
    return found


@pytest.fixture
def directory(tmp_path):
    """Where a shared center may be made. The memory of all centers below `tmp_path` is freed."""
    yield tmp_path / "run"
    for home in memories_below(tmp_path):
        shutil.rmtree(home, ignore_errors=True)  # another test may sweep it just now


@pytest.fixture
def memories():
    return memories_below


@pytest.fixture
def tmpfs(tmp_path, monkeypatch):
    """A tmpfs of our own, as far as this process can tell."""
    own = tmp_path / "shm"
    own.mkdir()
    monkeypatch.setattr(memory_file, "TMPFS", own)
    return own


@pytest.fixture
def start():
    """`start(function, *args)` runs `function(pipe, *args)` in a new process.

    It returns the process and our end of the pipe. Whatever still runs afterwards is killed.
    """
    started = []

    def start(function, *args):
        started.append(fork(function, *args))
        return started[-1]

    yield start
    for process, pipe in started:
        process.kill()
        process.join()
        pipe.close()


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of two nodes that this process is connected to, on a network of its own.

    Not for longer than a module: others need the network that there is.
    """
    from ray_cluster import ray_cluster

    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def together():
    """`together(*calls)` makes the calls at once, in threads, and returns their results."""

    def together(*calls):
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    return together


@pytest.fixture
def background():
    """`background(call)` makes a call in a thread of its own and returns its future."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


@pytest.fixture(autouse=True)
def _nothing_counted(monkeypatch):
    """As in a new process: `springline.steps` was not called, and no worker made."""
    monkeypatch.setattr(progress, "_count", progress._Count())
