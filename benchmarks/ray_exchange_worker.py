"""One worker of the Ray benchmark: what it times, and how."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import numpy as np
import ray

from springline import AGN, ElasticAverage, ModelAverage, Worker
from springline.center import Layout
from springline.center.ray import NAMESPACE, RayCenter, connect
from springline.rules import SGD, Rule

LEAST = "least"  # the actors that only take and give: least-0, least-1, …
TENSORS = 8  # an outer optimizer sees whole ones, and so they are not cut between shards
NEVER = 10**12  # a period: the benchmark calls `exchange` itself


class Case(NamedTuple):
    """One center and its workers."""

    parameters: int
    workers: int
    shards: int
    rounds: int
    rule: str = "elastic"


@dataclass
class Times:
    """What one worker measured: seconds, one of each in every round."""

    least: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)  # the least in as many parts as shards
    exchange: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


class Giver:
    """The least that can be called a center: it takes a buffer and gives one of the same size."""

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}  # of each size that was asked for

    def swap(self, buffer: Any) -> Any:
        """Get what was sent, and put what is sent back."""
        size = len(buffer)
        if size not in self._buffers:
            self._buffers[size] = np.ones(size, np.uint8)
        return self._buffers[size]


def join(case: Case, rank: int) -> Worker:
    """Join the case's center, which is made by whoever comes first."""
    first = np.random.default_rng(rank).standard_normal(case.parameters, np.float32)
    values = {f"w{k}": part for k, part in enumerate(np.split(first, TENSORS))}
    kinds: dict[str, Callable[..., Rule]] = {
        "elastic": ElasticAverage,
        "averaging": ModelAverage,
        "AGN": partial(AGN, optimizer=SGD(0.1)),
    }
    rule = kinds[case.rule](period=NEVER, workers=case.workers)
    name = f"bench-{case.rule}-{case.workers}-{case.shards}"
    layout = Layout.of(values)
    center = RayCenter.create_or_join(name, layout, rule, values, shards=case.shards)
    return Worker(values, rule, center, rank)


def make_givers(count: int) -> list[Any]:
    """Start the actors that only take and give, on any host there is."""
    options = {"num_cpus": 0, "max_concurrency": 8, "lifetime": "detached"}
    giver = ray.remote(Giver)
    return [giver.options(**options, name=f"{LEAST}-{k}").remote() for k in range(count)]


def send(case: Case, rank: int, address: str, meeting: Barrier, pipe: Connection) -> None:
    """Measure in a process of its own."""
    connect(address)
    pipe.send(measure(case, rank, meeting))
    pipe.close()
    ray.shutdown()


def measure(case: Case, rank: int, meeting: Barrier | threading.Barrier) -> Times:
    """Be a worker: memcpys, bare transfers and exchanges, in turn with all others."""
    worker = join(case, rank)
    givers = [ray.get_actor(f"{LEAST}-{k}", namespace=NAMESPACE) for k in range(case.shards)]
    buffer = np.ones(worker.layout.nbytes, np.uint8)
    room = np.empty_like(buffer)

    pieces = np.array_split(buffer, case.shards)

    def least() -> None:
        ray.get(givers[0].swap.remote(ray.put(buffer)))

    def parts() -> None:
        pairs = zip(givers, pieces, strict=True)
        ray.get([giver.swap.remote(ray.put(piece)) for giver, piece in pairs])

    kinds: list[tuple[str, Callable[[], object]]] = [
        ("memcpy", lambda: np.copyto(room, buffer)),
        ("least", least),
        ("parts", parts if case.shards > 1 else least),
        ("exchange", worker.exchange),
    ]
    times = Times()
    for k in range(case.rounds + 2):
        for what, call in (*kinds[k % 4 :], *kinds[: k % 4]):  # another is first in every round
            if case.rule == "AGN" and what == "exchange":
                worker.observe(dict.fromkeys(worker.parameters, np.ones(1, np.float32)))
            meeting.wait()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            if k > 1:  # memory has been touched
                getattr(times, what).append(seconds)
    meeting.wait()
    worker.member.leave()
    meeting.wait()
    center = worker.center
    if rank == 0 and isinstance(center, RayCenter):
        center.retire()
    return times
