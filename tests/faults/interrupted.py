"""A script that is interrupted again and again, catches it, and looks at its center.

    python interrupted.py HOME RULE LOCKING RANK

HOME has a board: row RANK counts how often the script was ready to be interrupted, and how often it
has seen that nothing is wrong. HOME/stop ends it. Without a RANK it is alone.
"""

import contextlib
import signal
import sys
from pathlib import Path

import numpy as np

from springline import AGN, ElasticAverage, ModelAverage
from springline.center.checkpoint import describe
from springline.center.plan import EXCHANGES
from springline.rules import SGD
from springline.signals import deferred
from springline.worker import Worker

READY, SEEN = range(2)
WORKERS = 2
SIZE = 400_001
RULES = {"elastic": ElasticAverage, "average": ModelAverage, "agn": AGN}


def open_board(home):
    """Map the board."""
    return np.memmap(home / "board", np.int64, "r+", shape=(WORKERS, 2))


def make_worker(home, name, locking, rank):
    """Make a worker of a rule whose arithmetic on our numbers is exact, or stays in their hull."""
    workers = 1 if rank is None else WORKERS
    options = {"moving_rate": 0.125 * workers} if name == "elastic" else {}
    if name == "agn":
        options = {"outer": SGD(1.0)}
    rule = RULES[name](period=1, workers=workers, **options)
    first = 0.0 if name == "agn" else 11.0
    values = {f"own{r}": np.full(SIZE, first, np.float32) for r in range(WORKERS)}
    center = None if rank is None else home / "center"
    return Worker(values, rule, center, rank or 0, use_locking=locking)


def train(worker, name):
    """Make one step."""
    if name == "agn":
        with deferred():  # a step that is left in the middle is the script's own affair
            worker.observe({f"own{worker.rank}": np.full(SIZE, -1, np.float32)})
    elif worker.local_step % 4 == 0:
        for x in worker.parameters.values():
            x.fill(10 + 2 * worker.rank)
    worker.step()


def check(worker, name, path):
    """Read the center and save it: both are right, and no exchange was made in part."""
    center, mine = worker.center, f"own{worker.rank}"
    exchanges = int(center.memory.ranks[worker.rank, EXCHANGES])
    c = center.values()[mine]
    if name == "agn":
        assert (c == exchanges).all(), (np.unique(c), exchanges)
    else:
        assert 10 <= c.min() <= c.max() <= 12, (c.min(), c.max())
    before = center.version
    center.save(path)
    under_way = 1 if name == "average" else 0  # a round may be closed and not in every shard yet
    assert before - under_way <= describe(path).version <= center.version
    assert not center._members[0]._busy


def main(home, name, locking, rank=None):
    """Train until there is HOME/stop."""
    worker = make_worker(home, name, locking, rank)
    row = open_board(home)[rank or 0]
    path = home / f"saved-{rank}.safetensors"
    armed = []

    def interrupt(number, frame):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    while not (home / "stop").exists():
        with contextlib.suppress(KeyboardInterrupt):
            armed.append(True)
            row[READY] += 1
            while not (home / "stop").exists():
                train(worker, name)
        armed.clear()
        check(worker, name, path)
        row[SEEN] += 1
    worker.finish()
    check_end(worker, name)
    worker.center.close()


def check_end(worker, name):
    """The last exchange has brought all."""
    if worker.rule.workers == 1 and name != "agn":
        c, x = worker.center.values(), worker.parameters
        assert all(np.allclose(c[key], x[key], atol=2) for key in x)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", *map(int, sys.argv[4:]))
