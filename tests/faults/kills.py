"""The drill: three workers exchange, one of them is killed and restarted, again and again."""

import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from invariants import WORKERS, Snapshot
from nursery import BUSY, CHILDREN, COLUMNS, DONE, LONGEST, PROCESS, Clock, open_board
from replays import SUBJECTS

from springline.center import CenterError, SharedCenter
from springline.center.memory_file import TMPFS
from springline.center.plan import EXCHANGES, STEPS

NURSERY = Path(__file__).with_name("nursery.py")
_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the tests' own rules
LONGEST_WAIT = 1.0  # seconds between two exchanges of a live worker, by its `Clock`
PATIENCE = 20.0  # seconds for what has no bound of its own


class Drill:
    """One rule in one lock mode. `home` is an empty directory."""

    def __init__(self, home, rule, locking, seed):
        self.home = home
        self.name = f"{rule}, use_locking={locking}, seed {seed}"
        self.random = random.Random(seed)
        self.subject = SUBJECTS[rule](locking)
        self.kills = 0
        self.interrupted = np.zeros(WORKERS, np.int64)
        self.processes = {}  # rank → process id
        self.version = 0
        self.changes = 0
        self._last_seen = self.subject.first
        (home / "board").write_bytes(bytes(8 * COLUMNS * (WORKERS + 1)))
        self.board = open_board(home / "board")
        self.clock = Clock(self.board)
        self.waits = {}  # rank → exchanges done, and nanoseconds since the last of this process
        self.center = None
        self.nursery = subprocess.Popen(
            [sys.executable, "-W", "error", NURSERY, home, rule, str(locking)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | _PATH,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leave nothing behind, also after a failure."""
        if group_exists(self.nursery.pid):
            os.killpg(self.nursery.pid, signal.SIGKILL)
        self.nursery.communicate()
        if self.center:
            self.center.close()
        for memory in self.memories():
            shutil.rmtree(memory)

    def __str__(self):
        inside, exchanges = self.interrupted.sum(), self.board[:WORKERS, DONE].sum()
        return (
            f"{self.name}: {inside} of {self.kills} kills inside an exchange, {exchanges} "
            f"exchanges, version {self.version}, longest wait {self.longest:.3f} s"
        )

    def run(self, kills):
        """Do it all, and check."""
        self.demand(self.answer() == "ready", "the nursery did not start")
        for rank in range(WORKERS):
            self.start(rank)
        self.watch(self._open)
        self.watch(lambda: (self.board[:WORKERS, DONE] > 0).all())
        for _ in range(kills):
            instant = time.monotonic() + self.random.uniform(0, 0.1)
            self.watch(lambda instant=instant: time.monotonic() >= instant)
            self.kill(self.random.randrange(WORKERS), at_once=self.random.random() < 0.5)
            self.check(self.center.values)
        self.finish()

    def start(self, rank):
        """Start the worker of that rank."""
        self.board[rank, [PROCESS, BUSY]] = 0
        self.waits[rank] = int(self.board[rank, DONE]), None
        self.processes[rank] = int(self.ask(f"start {rank}"))

    def kill(self, rank, at_once):
        """Kill a worker; the others must go on, also before it is back unless that is at once."""
        process = self.processes.pop(rank)
        os.kill(process, signal.SIGKILL)
        status = int(self.ask(f"reap {process}"))
        self.demand(status == signal.SIGKILL, f"rank {rank} ended by itself: {status}")
        self.kills += 1
        self.interrupted[rank] += self.board[rank, BUSY]
        # As it was left. Each element must be right at any instant, so no lock is needed to look.
        self.check(lambda: self.center.layout.views(self.center.memory.center.copy()))
        done = self.board[:, DONE].copy()
        others = list(self.processes)
        if at_once:
            self.start(rank)
        self.watch(lambda: (self.board[others, DONE] > done[others]).all())
        if not at_once:
            self.start(rank)

    def watch(self, until):
        """Look at the version and at waits that go on until something holds."""
        end = time.monotonic() + PATIENCE
        while True:
            self._look_at_waits(self.clock.lap())
            if self.center:
                version = self.center.version
                self.demand(version >= self.version, f"version {self.version} → {version}")
                self.version = version
            self.demand(not any(self.home.glob("error-*")), "a worker failed")
            if until():
                return
            self.demand(time.monotonic() < end, f"nothing happened in {PATIENCE} s")
            time.sleep(0.0005)

    def _look_at_waits(self, lap):
        lap = min(lap, 1e8)  # it may be this process that was kept from a CPU
        for rank in self.processes:
            done, (before, waited) = int(self.board[rank, DONE]), self.waits[rank]
            if done == before and waited is None:  # it starts
                continue
            waited = waited + lap if done == before else 0
            self.waits[rank] = done, waited
            self.demand(waited <= 1e9 * LONGEST_WAIT, f"rank {rank} waits: {waited / 1e9:.2f} s")

    def check(self, read, live=True):
        """Read the center and compare it with what its rule allows."""
        ranks, version = self.center.memory.ranks, self.center.version
        before = ranks[:, EXCHANGES].copy()
        values = read()
        after = ranks[:, EXCHANGES].copy()
        versions = version, self.center.version
        finite = all(np.isfinite(c).all() for c in values.values())
        self.demand(finite, "the center has values that are not finite")
        state = {} if live else self.outer_state()
        seen = Snapshot(values, versions, (before, after), self.interrupted, live, state, self.home)
        try:
            self.subject.check(seen)
        except AssertionError as error:
            self.demand(False, str(error))
        self.changes += self._last_seen != values["all"][0, 0]
        self._last_seen = values["all"][0, 0]

    def finish(self):
        """Stop all workers: nothing is lost, no lock is held, nothing is left."""
        self.board[-1, DONE] = 1
        for rank, process in self.processes.items():
            status = int(self.ask(f"reap {process}"))
            self.demand(status == 0, f"rank {rank} ended with {status}")
        self.processes.clear()
        self.watch(lambda: True)
        self.check(self.center.values, live=False)
        ranks = self.center.memory.ranks
        uncounted = ranks[:, EXCHANGES] - self.board[:WORKERS, DONE]
        counted = (uncounted >= 0) & (uncounted <= self.interrupted)
        self.demand(counted.all(), f"exchanges beyond those completed: {uncounted}")
        steps = abs(ranks[:, EXCHANGES] - ranks[:, STEPS])
        self.demand((steps <= self.interrupted).all(), f"steps without their exchange: {steps}")
        self.demand(self.longest <= LONGEST_WAIT, f"somebody waited {self.longest:.2f} s")
        self.demand(self.interrupted.sum() > 0, "no kill landed inside an exchange")
        self.demand(self.changes > 0, "the center did not move")
        self.demand(not is_locked(self.home / "center" / "lock"), "a lock is held")
        self.demand(not self.center.members(), f"members: {self.center.members()}")
        orphans = self.ask("end").split()
        expected = int(self.board[:, CHILDREN].sum())
        self.demand(len(orphans) >= expected > 0, f"{len(orphans)} of {expected} outlived theirs")
        self.demand(set(orphans) == {"0"}, f"the workers' children ended with {set(orphans)}")
        self.demand(self.nursery.wait(PATIENCE) == 0, "the nursery failed")
        self.demand(not group_exists(self.nursery.pid), "processes are left")
        self.center.retire()
        self.demand(not self.memories(), f"memory is left: {self.memories()}")

    def outer_state(self):
        """Return the outer optimizer's arrays."""
        entries, arrays = self.center.layout.entries, self.center.memory.state_of(self.center.plan)
        return {entries[i].name: state for i, state in arrays.items()}

    @property
    def longest(self):
        """The longest time, in seconds, between two exchanges of a worker, by its `Clock`."""
        return float(self.board[:, LONGEST].max()) / 1e9

    def ask(self, line):
        """Send the nursery a line and return its answer."""
        self.nursery.stdin.write(f"{line}\n")
        self.nursery.stdin.flush()
        return self.answer()

    def answer(self):
        """Return the nursery's next line."""
        ready = select.select([self.nursery.stdout], [], [], PATIENCE)[0]
        self.demand(ready, f"the nursery said nothing in {PATIENCE} s")
        return self.nursery.stdout.readline().strip()

    def demand(self, condition, message):
        """Fail with all that is known unless the condition holds."""
        if not condition:
            errors = [path.read_text() for path in self.home.glob("error-*")]
            raise AssertionError(
                "\n".join([f"{message} ({self.name}, kill {self.kills})", *errors])
            )

    def memories(self):
        """Return the directories in the tmpfs that belong to this center."""
        ours = str(self.home / "center")
        return [p.parent for p in TMPFS.glob("springline-*/run") if p.read_text() == ours]

    def _open(self):
        try:
            self.center = SharedCenter.open(self.home / "center")
        except CenterError:  # nobody has made it yet
            return False
        return True


def is_locked(path):
    """Whether any process holds a record lock on any byte of a file."""
    flock = struct.Struct("hhqqi4x")
    with path.open("r+b") as file:
        question = flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # a length of 0: to the end
        answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    return flock.unpack(answer)[0] != fcntl.F_UNLCK


def group_exists(group):
    """Whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
