"""What the suites of centers share that exchange through memory: rules, workers, messages."""

import contextlib
import gc
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from springline import AGN, ModelAverage
from springline.center.served.merger import Merger
from springline.center.served.peer import PeerLostError
from springline.rules import SGD, Adam, Momentum

WORKERS = 3
SIZE = 1_000_000
VALUES = {"w": np.zeros(SIZE, np.float32), "b": np.zeros(7, np.float32)}
BUFFERS = {"mean": np.zeros(SIZE // 4, np.float32)}


@dataclass(frozen=True)
class Whole(SGD):
    """An outer optimizer that wants to see whole parameters."""

    elementwise = False

    def step(self, name, c, g, state, rate, work):
        assert c.shape == g.shape == VALUES[name].shape
        super().step(name, c, g / (1 + np.abs(g).max()), state, rate, work)


RULES = {
    "average": ModelAverage(workers=WORKERS, period=1),
    "sgd": AGN(workers=WORKERS, period=1, optimizer=SGD(0.5)),
    "momentum": AGN(workers=WORKERS, period=1, optimizer=Momentum(0.5)),
    "adam": AGN(workers=WORKERS, period=1, optimizer=Adam(0.5)),
    "whole": AGN(workers=WORKERS, period=1, optimizer=Whole(0.5)),
}


def asked_of(service):
    """The methods of the shards that are called from now on."""
    asked = []
    for peer in service.shards:
        peer.disturb = asked.append
    return asked


def center_of(service):
    return np.concatenate([p.target.read().data.view(np.float32) for p in service.shards])


def noise(*seed):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


def restarts(service, monkeypatch, method, piece):
    """Let the first shard be started again, from its storage, the first time it gets to a piece."""
    old, plain = service.shards[0].target, getattr(Merger, method)

    def die(merger, *arguments):
        here = piece in [a for a in arguments if isinstance(a, int)]
        if merger is old._merger and (here or service.shards[0].target is not old):
            time.sleep(0.3)  # until workers have adopted what there was
            service.shards[0].target = service.make[0]()
            raise PeerLostError("the shard has died")
        return plain(merger, *arguments)

    monkeypatch.setattr(Merger, method, die)
    return lambda: service.shards[0].target is not old


def elsewhere(*_, **__):
    raise OSError("no such process")


def open_files():
    """How many pipes and pieces of lent memory are open: what else is, others may open or close."""
    gc.collect()  # what other tests have left
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(file.readlink()))
    return sum("springline" in link or "pipe:" in link for link in links)
