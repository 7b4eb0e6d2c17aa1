"""One worker process of the exchange benchmark: what it times, and how."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline import AGN, DiLoCo, ElasticAverage, ModelAverage, Worker
from springline.rules import SGD, Nesterov, Rule

NEVER = 10**12  # a period: the benchmark calls `exchange` itself
VECTOR = 1000  # elements of a small tensor
STEPS = 20_000  # not due, timed together
RULES: dict[str, Callable[..., Rule]] = {
    "elastic": ElasticAverage,
    "averaging": ModelAverage,
    "AGN, SGD": partial(AGN, outer=SGD(0.01)),
    "DiLoCo": partial(DiLoCo, outer=Nesterov(0.7, 0.9)),
}


@dataclass(frozen=True)
class Case:
    """One setting: a block is some memcpys alone, some by all at once, some exchanges by all."""

    parameters: int
    rule: str
    locked: bool
    workers: int
    blocks: int
    each: int  # memcpys and exchanges of each worker in a block
    tensors: int = 1
    fragments: int = 1

    @property
    def settings(self) -> Rule:
        """The rule, as the workers have it."""
        return RULES[self.rule](period=NEVER, workers=self.workers, fragments=self.fragments)

    @property
    def what(self) -> str:
        """Name the case in a few words."""
        model = f"{self.parameters / 1e6:g} M" + f" in {self.tensors} tensors" * (self.tensors > 1)
        model += f" and {self.fragments} fragments" * (self.fragments > 1)
        locked = "locked" if self.locked else "not locked"
        return f"{model}, {self.rule}, {locked}, {self.workers} worker" + "s" * (self.workers > 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return 4 * self.parameters

    @property
    def private_nbytes(self) -> int:
        """Bytes of all workers' own memory: x, a or base, and the memcpy's two buffers."""
        buffers = 3 + self.settings.accumulates + self.settings.keeps_base
        return buffers * self.nbytes * self.workers

    @property
    def center_nbytes(self) -> int:
        """Bytes that the center should have: the model, momentum, and for rounds slots."""
        slots = self.workers if self.settings.rounds else 0
        return (1 + len(self.settings.outer.state("", (1,))) + slots) * self.nbytes


@dataclass
class Times:
    """What one worker measured: seconds, a list per block."""

    rank: int
    alone: list[list[float]] = field(default_factory=list)  # memcpys, the others idle
    together: list[list[float]] = field(default_factory=list)  # memcpys, by all at once
    exchange: list[list[float]] = field(default_factory=list)
    allocated: int = 0  # bytes, at most at any time in an exchange
    step: float = 0.0  # seconds of one that is not due


@dataclass
class Meeting:
    """Where the workers of a case wait for each other."""

    barrier: Barrier
    finished: Synchronized[int]

    def all_at_once(
        self, times: int, one: Callable[[], float], go_on: bool, workers: int
    ) -> list[float]:
        """Time `one` with all workers at it, and go on with it until the last one is through."""
        self.barrier.wait()
        self.finished.value = 0
        self.barrier.wait()
        seconds = [one() for _ in range(times)]
        with self.finished.get_lock():
            self.finished.value += 1
        while go_on and self.finished.value < workers:
            one()
        return seconds


def work(case: Case, rank: int, directory: Path, meeting: Meeting, results: Connection) -> None:
    """Join the center, measure, send the `Times`."""
    rule = case.settings
    pattern = np.random.default_rng(7).standard_normal(min(case.parameters, 1 << 20), np.float32)
    source = np.resize(pattern, case.parameters)
    target = np.empty_like(source)
    parts = split(source, case.tensors)
    worker = Worker(parts, rule, directory, rank, use_locking=case.locked)
    for x in worker.parameters.values():
        x += rank + 1

    def copy() -> float:
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    def exchange() -> float:
        if rule.accumulates:
            worker.observe(parts)
        start = time.perf_counter()
        worker.exchange()
        return time.perf_counter() - start

    times = Times(rank)
    for _ in range(2):  # the first exchange makes its views, the first memcpy faults its pages in
        copy()
        exchange()
    for _ in range(case.blocks):
        meeting.barrier.wait()
        if rank == 0:
            times.alone.append([copy() for _ in range(case.each)])
        meeting.barrier.wait()
        if case.workers > 1:
            times.together.append(meeting.all_at_once(case.each, copy, True, case.workers))
        # Workers of a synchronous rule wait for each other in every exchange.
        times.exchange.append(
            meeting.all_at_once(case.each, exchange, not rule.rounds, case.workers)
        )
    times.allocated = _allocated(exchange)
    times.step = _step(worker, {} if rule.accumulates else parts)
    worker.center.close()
    results.send(times)


def split(flat: NDArray[Any], tensors: int) -> dict[str, NDArray[Any]]:
    """Name the parts of a flat model: one, or as many small vectors as larger tensors."""
    vectors = tensors // 2
    large = np.array_split(flat[vectors * VECTOR :], tensors - vectors)
    small = flat[: vectors * VECTOR].reshape(vectors, VECTOR)
    parts = {f"layer{k}.weight": part for k, part in enumerate(large)}
    return parts | {f"layer{k}.bias": part for k, part in enumerate(small)}


def _allocated(exchange: Callable[[], float]) -> int:
    tracemalloc.start()
    exchange()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    exchange()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


def _step(worker: Worker, gradients: dict[str, NDArray[Any]]) -> float:
    """Time a step that is not due; what AGN adds up in `observe` is left out."""

    def steps() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            if gradients:
                worker.observe(gradients)
            worker.step()
        return (time.perf_counter() - start) / STEPS

    return float(np.median([steps() for _ in range(5)]))
