"""What runs on a host of the benchmark between two hosts; what it finds is printed as JSON.

make ADDRESS CASE          make what Ray's worker meets; on the host that is to hold it
ray ADDRESS CASE           be that worker
group RANK STORE CASE      be a rank of a process group
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray

from springline import ElasticAverage, Worker
from springline.center import Layout
from springline.center.ray import NAMESPACE, RayCenter, connect

GIVER = "giver"  # the actor that only takes and gives
NEVER = 10**12  # a period: the benchmark calls `exchange` itself


class Case(NamedTuple):
    """One center on Ray, and its worker."""

    parameters: int
    shards: int
    rounds: int


@dataclass
class Times:
    """What the worker measured: seconds, one of each in every round."""

    alone: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)


class Giver:
    """The least that can be called a center: it takes a buffer and gives one of the same size."""

    def __init__(self, size: int) -> None:
        self._buffer = np.ones(size, np.uint8)

    def swap(self, buffer: Any) -> Any:
        """Get what was sent, and put what is sent back."""
        return self._buffer


def join(case: Case) -> Worker:
    """Join the case's center, which is made by whoever comes first."""
    values = {"w": np.random.default_rng(0).standard_normal(case.parameters, np.float32)}
    rule = ElasticAverage(period=NEVER)
    layout = Layout.of(values)
    options: Any = {"shards": case.shards, "token": "two-hosts"}
    center = RayCenter.create_or_join("two-hosts", layout, rule, values, **options)
    return Worker(values, rule, center)


def make(case: Case) -> None:
    """Make the center, and the actor that only takes and gives."""
    options = {"name": GIVER, "lifetime": "detached", "num_cpus": 0}
    giver: Any = ray.remote(Giver).options(**options).remote(4 * case.parameters)
    ray.get(giver.__ray_ready__.remote())
    join(case).member.leave()


def measure(case: Case) -> Times:
    """Be the worker: bare transfers and exchanges, in turn."""
    worker = join(case)
    giver: Any = ray.get_actor(GIVER, namespace=NAMESPACE)
    buffer = np.ones(4 * case.parameters, np.uint8)
    times = Times()
    kinds: list[tuple[list[float], Callable[[], object]]] = [
        (times.alone, lambda: ray.get(giver.swap.remote(ray.put(buffer)))),
        (times.exchange, worker.exchange),
    ]
    for k in range(case.rounds + 2):
        for found, call in kinds if k % 2 else kinds[::-1]:
            start = time.perf_counter()
            call()
            if k > 1:  # memory has been touched
                found.append(time.perf_counter() - start)
    worker.member.leave()
    return times


def main(what: str, *given: str) -> None:
    """Do what is asked for."""
    *where, case = given
    if what == "group":
        import collective_worker as group

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        rank, store = where
        found = group.measure(group.Case(*json.loads(case)), int(rank), store)
        print(json.dumps(asdict(found)), flush=True)
        return
    connect(*where)
    if what == "make":
        make(Case(*json.loads(case)))
    else:
        print(json.dumps(asdict(measure(Case(*json.loads(case))))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
