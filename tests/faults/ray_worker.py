"""One worker of a center on Ray, in a process of its own, that writes down every exchange.

    ray_worker.py HOME [RANK FIRST]

HOME has the settings. FIRST is the value of all parameters that the worker comes with. Without
these it is one of the workers of a `springline run`. It trains
until it has made as many steps as `HOME/steps` says for its rank, once that is there.

Its log has a line for each of these: `born ID STEPS VALUE…`, `begin TIME`, `held`,
`end TIME VALUE` and `done VALUE…`. Values are its parameters', where there are several: one per
shard. Times are of the machine's monotonic clock.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import ray

from springline import AGN, ElasticAverage, ModelAverage, Worker
from springline.center import Layout, ray_peer
from springline.center.ray import RayCenter
from springline.center.remote.messages import span
from springline.center.remote.peer import NotHereError
from springline.rules import SGD
from springline.run import Run

TENSORS = 8
BASE = 4096  # under AGN the center counts each rank's exchanges: Σ count · BASE^rank, exactly


def rule_of(name, workers):
    if name == "agn":
        return AGN(workers=workers, period=1, outer=SGD(1.0))
    if name == "elastic":
        return ElasticAverage(workers=workers, period=1, moving_rate=0.25)
    return ModelAverage(workers=workers, period=1)


def open_center(settings, rule, values):
    return RayCenter.create_or_join(
        settings["name"],
        Layout.of(values),
        rule,
        values,
        address=settings["address"],
        shards=settings["shards"],
        storage=settings["storage"],
        every=tuple(settings["every"]),
        grace=settings["grace"],
        token=settings["name"],
    )


def train_step(worker, rule):
    """What the center can be told apart by."""
    w = flat(worker)
    if rule == "agn":
        gradient = np.full(w.size // TENSORS, -float(BASE**worker.rank))
        worker.observe(dict.fromkeys(worker.parameters, gradient))
    elif rule == "elastic":
        w += 1
    else:
        w[:] = 4.0**worker.rank  # the mean tells whose it is


def flat(worker):
    """All parameters in one array."""
    return worker.local.x.view(np.float64)


def hold_replies(home, note):
    """While `HOME/hold` is there, fetch no shard's reply: it stays where the shard is."""
    result, hold = ray_peer._Pending.result, home / "hold"

    def result_later(pending, timeout):
        if hold.exists() and threading.current_thread() is threading.main_thread():
            if not ray.wait([pending._ref], timeout=timeout, fetch_local=False)[0]:
                raise NotHereError
            note("held")
            while hold.exists():
                time.sleep(0.01)
        return result(pending, timeout)

    ray_peer._Pending.result = result_later


def last_step(home, rank):
    steps = home / "steps"
    return json.loads(steps.read_text())[rank] if steps.exists() else float("inf")


def main(home, rank=None, first=0.0):
    settings = json.loads((home / "settings.json").read_text())
    rule = rule_of(settings["rule"], settings["workers"])
    values = {f"w{k}": np.full(settings["size"] // TENSORS, first) for k in range(TENSORS)}
    if rank is None:
        run = Run.from_environment()
        rank, center = run.rank, run.center_directory
    else:
        center = open_center(settings, rule, values)
    log = os.open(home / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words):
        os.write(log, " ".join(map(str, (*words, "\n"))).encode())

    hold_replies(home, note)
    with Worker(values, rule, center, rank, synchronous=False) as worker:
        w, center = flat(worker), worker.center
        parts = [w[start // 8 : stop // 8] for start, stop in map(span, center.parts)]
        note("born", os.getpid(), worker.start_step, *[part[0] for part in parts])
        while worker.start_step + worker.local_step < last_step(home, rank):
            time.sleep(settings["pace"])
            train_step(worker, settings["rule"])
            note("begin", time.monotonic())
            worker.step()
            note("end", time.monotonic(), w[0])
        assert all(np.ptp(part) == 0 for part in parts), "a part is not of one value"
        note("done", *[part[0] for part in parts])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))
