"""What the tests of the launcher look at: processes, commands and a run on disk."""

import time
from pathlib import Path

from springline.center import CenterError, SharedCenter, memory_file
from springline.center.checkpoint import describe, newest
from springline.launch_state import LaunchState

TRAINING = Path(__file__).with_name("training.py")


def wait_for(condition, seconds=30.0):
    """Ask again and again until the answer is true; return it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return answer


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids):
    return not any(alive(pid) for pid in pids)


class RunOnDisk:
    """What a run's directory tells."""

    def __init__(self, path):
        self.path = path

    @property
    def state(self):
        return LaunchState.read(self.path)

    def worker(self, rank):
        return self.state.workers[rank]

    def running(self, rank):
        """The pid of a worker that runs; None while it does not."""
        state = self.state
        return state and len(state.workers) > rank and state.workers[rank].pid

    def steps(self):
        """How far the ranks are, from memory or from the checkpoint; None without a center."""
        try:
            with SharedCenter.open(self.path / "center") as center:
                return [rank.steps for rank in center.progress()]
        except CenterError:
            saved = newest(self.path / "center" / "checkpoint.safetensors")
            return describe(saved).steps if saved else None

    def further(self, rank, than):
        """Whether a worker runs and has come further."""
        return (self.steps() or [0] * (rank + 1))[rank] > than and self.running(rank)

    def at_work(self, step=1):
        """Whether all ranks have exchanged."""
        return min(self.steps() or [0]) >= step

    def log(self, rank):
        return (self.path / "logs" / f"rank-{rank}.log").read_text()

    def memory(self):
        """The memory of its center that has not been freed."""
        owners = memory_file.TMPFS.glob("springline-*/run")
        return [p.parent for p in owners if p.read_text() == str(self.path / "center")]


class Command:
    """A command that has been started."""

    def __init__(self, process, output):
        self.process = process
        self._output = output

    @property
    def output(self):
        return self._output.read_text()

    def send(self, number):
        self.process.send_signal(number)

    def wait(self, seconds=180.0):
        """Wait for its end; return its exit status."""
        return self.process.wait(seconds)
