"""A warm process that forks workers on request, and their lives.

It has imported everything but opened no center and started no thread, so that a fork is cheap and
clean. It says `ready` and then answers lines: `start RANK` → the process id; `reap ID` → the wait
status; `end` → the wait statuses of the children that killed workers have left behind.
"""

import contextlib
import ctypes
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from invariants import WORKERS, first_values
from replays import SUBJECTS

from springline.worker import Worker

# Columns of the board, a mapped file with a row per rank. The last row's DONE asks all to stop.
PROCESS, LONGEST, DONE, BUSY, CHILDREN, COLUMNS = range(6)
ORPHANS = 40  # at most about so many at a time: each keeps a copy of its worker's memory
TICK = 20e6  # nanoseconds in which the kernel counts what a running process has run
_PR_SET_CHILD_SUBREAPER = 36


def open_board(path):
    """Map the board: PROCESS id, LONGEST wait for an exchange, DONE, BUSY now, CHILDREN forked."""
    return np.memmap(path, np.int64, "r+", shape=(WORKERS + 1, COLUMNS))


class Clock:
    """What goes by while no worker that could run is kept from a CPU, in nanoseconds.

    So it shows how long a worker has waited for the others, however busy the machine is.
    """

    def __init__(self, board):
        self._board = board
        self._seen = {}  # by process: since when it has run and been kept for as long as it has
        self._last = time.monotonic_ns(), self._kept_waiting(time.monotonic_ns())

    def _kept_waiting(self, now):
        """By process, how long it could run, and the kernel let others; of all that live.

        The kernel counts that when it lets the process run again: until then it stands still.
        """
        found = {}
        for process in self._board[:WORKERS, PROCESS].tolist():
            with contextlib.suppress(OSError, ValueError):  # it is gone, or has just begun
                status = Path(f"/proc/{process}")
                counts = (status / "schedstat").read_text()
                if self._seen.get(process, ("",))[0] != counts:
                    self._seen[process] = counts, now
                still = now - self._seen[process][1]
                runnable = (status / "stat").read_text().rpartition(")")[2].split()[0] == "R"
                kept = still - TICK if runnable and still > TICK else 0
                found[process] = int(counts.split()[1]) + kept
        return found

    def lap(self):
        """Return how much has gone by since the last call."""
        (then, before), now = self._last, time.monotonic_ns()
        after = self._kept_waiting(now)
        self._last = now, after
        kept = max((after[p] - before.get(p, after[p]) for p in after), default=0)
        return max(0, now - then - kept)


def live(rank, home, subject, locking, leash):
    """Exchange as fast as possible until all are asked to stop."""
    board = open_board(home / "board")
    row = board[rank]
    row[PROCESS] = os.getpid()
    # A restarted worker comes with other values, which must not get into the center.
    values = first_values(-1e6 if row[DONE] else subject.first)
    worker = Worker(values, subject.rule, home / "center", rank, use_locking=locking)
    if os.fork() == 0:  # as a DataLoader does: it keeps what it inherits, and outlives a kill
        os.read(leash, 1)
        os._exit(0)
    row[CHILDREN] += 1
    clock = None  # while it starts
    while not board[-1, DONE]:
        subject.before(worker)
        row[BUSY] = 1
        worker.step()
        if clock:
            row[LONGEST] = max(row[LONGEST], clock.lap())
        clock = clock or Clock(board)
        row[DONE] += 1
        row[BUSY] = 0
        subject.after(worker)
    worker.finish()
    worker.center.close()


def main(home, rule, locking):
    """Serve until `end`, or until the other side is gone."""
    # The children that killed workers leave behind become ours to wait for.
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    leash, held = os.pipe()  # the workers' children live until the last writer is gone
    workers, reaped = set(), 0
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "end":
            break
        number = int(arguments[0])
        if command == "start":
            threads = list(Path("/proc/self/task").iterdir())
            assert len(threads) == 1, "a process with threads cannot be forked cleanly"
            answer = os.fork()
            if answer == 0:
                _be_born(number, home, SUBJECTS[rule](locking), locking, leash, held)
            workers.add(answer)
        else:
            answer = os.waitpid(number, 0)[1]
            workers.discard(number)
            reaped += 1
            if reaped > ORPHANS:
                os.write(held, b".")  # one of them reads it, and ends
        print(answer, flush=True)
    for worker in workers:
        os.kill(worker, 9)
    os.close(held)
    statuses = []
    with contextlib.suppress(ChildProcessError):
        while True:
            statuses.append(os.wait()[1])
    print(*statuses, flush=True)


def _be_born(rank, home, subject, locking, leash, held):
    os.close(held)
    try:
        live(rank, home, subject, locking, leash)
    except BaseException:
        (home / f"error-{os.getpid()}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True")
