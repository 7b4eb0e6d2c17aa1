"""One worker of the Ray benchmark: what it times, and how."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import numpy as np
import ray

from springline import ElasticAverage, Worker
from springline.center import Layout
from springline.center.ray import NAMESPACE, RayCenter, connect

LEAST = "least"  # the name of the actor that only takes and gives
NEVER = 10**12  # a period: the benchmark calls `exchange` itself


class Case(NamedTuple):
    """One center and its workers."""

    parameters: int
    workers: int
    shards: int
    rounds: int


@dataclass
class Times:
    """What one worker measured: seconds, one of each in every round."""

    least: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


class Giver:
    """The least that can be called a center: it takes a buffer and gives one of the same size."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = np.ones(nbytes, np.uint8)

    def swap(self, buffer: Any) -> Any:
        """Get what was sent, and put what is sent back."""
        return self._buffer if len(buffer) == len(self._buffer) else None


def measure(case: Case, rank: int, address: str, meeting: Barrier, pipe: Connection) -> None:
    """Be a worker: memcpys, bare transfers and exchanges, in turn with all others."""
    connect(address)
    values = {"w": np.random.default_rng(rank).standard_normal(case.parameters, np.float32)}
    rule = ElasticAverage(period=NEVER, workers=case.workers)
    name = f"bench-{case.workers}-{case.shards}"
    layout = Layout.of(values)
    center = RayCenter.create_or_join(name, layout, rule, values, shards=case.shards)
    worker = Worker(values, rule, center, rank, synchronous=True)
    giver = ray.get_actor(LEAST, namespace=NAMESPACE)
    buffer = np.ones(worker.layout.nbytes, np.uint8)
    room = np.empty_like(buffer)

    def least() -> None:
        ray.get(giver.swap.remote(ray.put(buffer)))

    kinds: list[tuple[str, Callable[[], object]]] = [
        ("memcpy", lambda: np.copyto(room, buffer)),
        ("least", least),
        ("exchange", worker.exchange),
    ]
    times = Times()
    for k in range(case.rounds + 2):
        for what, call in (*kinds[k % 3 :], *kinds[: k % 3]):  # another is first in every round
            meeting.wait()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            if k > 1:  # memory has been touched
                getattr(times, what).append(seconds)
    meeting.wait()
    worker.member.leave()
    meeting.wait()
    if rank == 0:
        center.retire()
    pipe.send(times)
    pipe.close()
    ray.shutdown()
