"""One rank of the collective benchmark: what it times, and how."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from springline import ElasticAverage, ModelAverage, Worker
from springline.center.collective import Collective, CollectiveCenter
from springline.center.collective.group import Group
from springline.rules import Rule

NEVER = 10**12  # a period: the benchmark calls `exchange` itself
RULES: dict[str, Callable[[int], Rule]] = {
    "averaging": lambda workers: ModelAverage(period=NEVER, workers=workers),
    "elastic": lambda workers: ElasticAverage(period=NEVER, workers=workers),
}


class Case(NamedTuple):
    """One process group."""

    parameters: int
    ranks: int
    rounds: int


@dataclass
class Times:
    """What one rank measured: seconds, one of each in every round."""

    bare: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)  # of as many bytes
    exchange: dict[str, list[float]] = field(default_factory=dict)
    adding: dict[str, list[float]] = field(default_factory=dict)  # the exchange's own all-reduce


def measure(case: Case, rank: int, store: str) -> Times:
    """Be a rank: a bare all-reduce and an exchange of each rule, in turn."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    values = {"w": np.random.default_rng(rank).standard_normal(case.parameters, np.float32)}
    workers = {
        name: Worker(values, rule(case.ranks), Collective(dist.group.WORLD), rank)
        for name, rule in RULES.items()
    }
    inside = {name: _timed_adding(worker) for name, worker in workers.items()}
    tensor = torch.zeros(case.parameters)
    times = Times(exchange={name: [] for name in RULES}, adding={name: [] for name in RULES})
    kinds: Sequence[str] = ["bare", *RULES]
    for k in range(case.rounds + 1):
        for name in (*kinds[k % 3 :], *kinds[: k % 3]):  # another is first in every round
            if name == "bare":
                tensor.fill_(rank)  # it has been used, as a worker's parameters have
                seconds = _seconds(lambda: dist.all_reduce(tensor))
                copying = _seconds(lambda: np.copyto(values["w"], tensor.numpy()))
            else:
                workers[name].local.x.view(np.float32)[:] += rank + 1  # no copies of one worker
                inside[name].clear()
                seconds = _seconds(workers[name].exchange)
            if k == 0:  # memory is touched for the first time
                continue
            if name == "bare":
                times.bare.append(seconds)
                times.memcpy.append(copying)
            else:
                times.exchange[name].append(seconds)
                times.adding[name].append(sum(inside[name]))
    for worker in workers.values():
        worker.finish()
    dist.barrier()
    return times


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed_adding(worker: Worker) -> list[float]:
    """Let a worker's all-reduces be timed; return where their seconds go."""
    center, seconds = worker.center, list[float]()
    assert isinstance(center, CollectiveCenter)
    plain = center.replica.add_up

    def timed(group: Group, fragment: int) -> None:
        start = time.perf_counter()
        plain(group, fragment)
        seconds.append(time.perf_counter() - start)

    center.replica.add_up = timed  # type: ignore[method-assign]
    return seconds
