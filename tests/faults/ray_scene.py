"""A run of real workers with a center on Ray, of which one sees every exchange."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from springline.center.remote.storage import Storage

HERE = Path(__file__).parent
PATIENCE = 180.0  # seconds for what has no bound of its own
MORE = 10  # steps that all make after the fault, at least


class Birth(NamedTuple):
    """How a worker has begun."""

    process: int
    steps: int
    values: list[float]  # one per shard


@dataclass
class Log:
    """What a rank has written down, across restarts."""

    born: list[Birth] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    busy: bool = False  # in the middle of an exchange
    held: bool = False  # in the middle of an exchange, before it takes a reply's data
    done: list[float] | None = None

    @classmethod
    def read(cls, path):
        log = cls()
        for line in path.read_text().splitlines() if path.exists() else []:
            what, *words = line.split()
            if what == "born":
                values = [float(word) for word in words[2:]]
                log.born.append(Birth(int(words[0]), int(words[1]), values))
            elif what == "end":
                log.ends.append(float(words[0]))
                log.values.append(float(words[1]))
            elif what == "done":
                log.done = [float(word) for word in words]
            log.busy = what in ("begin", "held")
            log.held = what == "held"
        return log


class OneMachine:
    """A Ray cluster on this machine, as if it were many hosts."""

    def __init__(self, address):
        self.address = address

    def __getitem__(self, number):
        return self

    def start(self, *command, **options):
        return subprocess.Popen(list(map(str, command)), **options)

    def at(self, address):
        return self

    def signal(self, process, number):
        os.kill(process, number)

    def end(self, started):
        started.kill()
        started.wait()


class Scene:
    """A run. `home` is an empty directory.

    Args:
        home: for logs and storage.
        hosts: where processes run, by number.
        rule: `agn`, `elastic` or `average`.
        workers: how many.
        shards: how many.
        every: exchanges, and seconds, between two checkpoints of a shard.
        grace: seconds after which a silent worker counts as dead.
    """

    def __init__(self, home, hosts, rule, workers=2, shards=2, every=(20, 5.0), grace=10.0):
        self.home, self.hosts, self.rule = home, hosts, rule
        self.workers, self.shards = workers, shards
        self.settings = {
            "name": home.name,
            "address": hosts.address,
            "rule": rule,
            "workers": workers,
            "size": 512_000,
            "shards": shards,
            "storage": str(home / "storage"),
            "every": every,
            "grace": grace,
            "pace": 0.05,
        }
        (home / "settings.json").write_text(json.dumps(self.settings))
        self.processes = {}  # rank → host and process
        self.fault_at = None
        self._watcher = None
        self._ended = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leave nothing behind, also after a failure."""
        if self._watcher and self._watcher.poll() is None:
            self.ask("end")
        for process in (*(p for _, p in self.processes.values()), *self._ended, self._watcher):
            if process:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe:
                        pipe.close()

    # Workers.

    def start(self, rank, host=None, first=0.0):
        """Start a worker."""
        host = host or self.hosts[rank]
        with (self.home / f"rank-{rank}.err").open("a") as errors:
            process = host.start(
                *(sys.executable, HERE / "ray_worker.py", self.home, rank, first),
                stdout=errors,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self.processes[rank] = host, process

    def begin(self, ranks=None):
        """Start workers, and wait until all have exchanged."""
        for rank in range(self.workers) if ranks is None else ranks:
            self.start(rank)
        self.exchange()

    def exchange(self, ranks=None, times=MORE):
        """Wait until workers have made so many more exchanges."""
        ranks = list(self.processes) if ranks is None else ranks
        before = {rank: len(self.log(rank).ends) for rank in ranks}
        self.wait(
            lambda: all(len(self.log(rank).ends) >= before[rank] + times for rank in ranks),
            f"{times} more exchanges of ranks {ranks}",
        )

    def drive(self):
        """Start `springline run` on the first host, to start the workers."""
        words = ["--workers", self.workers, "--center-shards", self.shards, "--no-live"]
        words += ["--address", self.hosts.address, "--run", self.home / "run"]
        with (self.home / "driver.err").open("a") as errors:
            driver = self.hosts[0].start(
                *(Path(sys.executable).with_name("springline"), "run", *words),
                *(HERE / "ray_worker.py", self.home),
                stdout=errors,
                stderr=errors,
            )
        self._ended.append(driver)
        return driver

    def logs(self):
        return [self.log(rank) for rank in range(self.workers)]

    def log(self, rank):
        return Log.read(self.home / f"rank-{rank}.log")

    def signal(self, rank, number):
        """Send a worker a signal."""
        host, process = self.processes[rank]
        host.signal(self.log(rank).born[-1].process, number)
        if number == signal.SIGKILL:
            process.wait(PATIENCE)
            self.forget(rank)

    def done(self):
        """Each rank's exchanges so far, across restarts."""
        return np.array([len(log.ends) for log in self.logs()])

    def forget(self, rank):
        """A worker is known to be dead."""
        self._ended.append(self.processes.pop(rank)[1])

    def pass_by(self, seconds):
        """Let some time pass."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, "the clock", seconds + PATIENCE)

    def wait(self, until, what, seconds=PATIENCE):
        """Wait for something, while no worker fails."""
        deadline = time.monotonic() + seconds
        while not until():
            for rank, (_, process) in self.processes.items():
                assert process.poll() in (None, 0), f"rank {rank} failed:\n{self.errors(rank)}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.errors()}"
            time.sleep(0.01)

    def errors(self, *ranks):
        """What workers have said."""
        paths = sorted(self.home.glob("rank-*.err"))
        said = [f"{path.stem}: {path.read_text()}" for path in paths]
        return "\n".join(text for rank, text in enumerate(said) if not ranks or rank in ranks)

    # The center.

    def ask(self, line):
        """Ask the watcher."""
        if self._watcher is None or self._watcher.poll() is not None:
            with (self.home / "watcher.err").open("a") as errors:
                self._watcher = self.hosts[0].start(
                    *(sys.executable, HERE / "ray_watcher.py", self.hosts.address, self.home.name),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            assert self._answer() == "ready"
        print(line, file=self._watcher.stdin, flush=True)
        return self._answer()

    def _answer(self):
        ready = select.select([self._watcher.stdout], [], [], PATIENCE)[0]
        line = self._watcher.stdout.readline() if ready else ""
        said = (self.home / "watcher.err").read_text()
        assert line, f"the watcher has ended, or said nothing in {PATIENCE} s:\n{said}"
        return json.loads(line)

    def kept(self, shard):
        """Each rank's exchanges in a shard's last checkpoint."""
        header, tensors = Storage(str(self.home / "storage")).read(f"shard-{shard}")
        assert tensors["center"].size
        return [header["rows"].get(str(rank), [0] * 5)[3] for rank in range(self.workers)]

    # Faults.

    def host_at(self, address):
        """The host of that address."""
        return self.hosts.at(address)

    def hold(self, ranks):
        """Let workers wait in the middle of an exchange, whose replies are still at the shards."""
        (self.home / "hold").touch()
        self.wait(lambda: all(self.log(rank).held for rank in ranks), "replies to be held")

    def release(self):
        """Let them go on."""
        (self.home / "hold").unlink(missing_ok=True)

    def move(self):
        """Kill all hosts; go on with others."""
        self.hosts.restart()
        for rank in list(self.processes):
            self.forget(rank)

    def fault(self):
        """Remember that a fault begins now."""
        self.fault_at = time.monotonic()

    def gap(self, *ranks):
        """The longest time between two exchanges of a worker since the fault; the usual before."""
        longest, usual = 0.0, []
        for rank in ranks:
            ends = np.array(self.log(rank).ends)
            gaps, after = np.diff(ends), ends[1:] > self.fault_at
            longest = max(longest, float(gaps[after].max()))
            usual += [float(np.median(gaps[~after]))]
        return longest, float(np.median(usual))

    def finish(self):
        """Let every worker make some more steps; return each rank's, and what the center is."""
        steps = self.set_steps()
        self.wait(lambda: all(p.poll() == 0 for _, p in self.processes.values()), "the end")
        assert all(log.done for log in self.logs()), self.errors()
        found = self.ask("center")
        assert (found["steps"] == steps).all(), (found, steps)
        assert found["members"] == []
        return steps, found

    def set_steps(self):
        """Tell every worker to end after some more steps; return how many each has then made."""
        steps = [log.born[0].steps + len(log.ends) + 3 * MORE for log in self.logs()]
        temporary = self.home / "steps.new"
        temporary.write_text(json.dumps(steps))
        temporary.rename(self.home / "steps")
        return np.array(steps)
