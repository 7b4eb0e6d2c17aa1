"""The slow twin: p workers and a center in one plain loop. Everything else must agree with it.

No blocks, no locks, no clever memory: the formulas of SPEC's table, written out again, on
dictionaries of arrays. Front ends and centers are compared with the rows it yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.rules.agn import AGN
from springline.rules.elastic import ElasticAverage
from springline.rules.outer import Outer
from springline.rules.rule import Rule

Array = NDArray[Any]
Arrays = dict[str, Array]
Gradient = Callable[[int, int, Arrays], Mapping[str, Array]]


@dataclass
class Optimizer:
    """Any outer optimizer with its own state: an inner optimizer, or the center's."""

    kind: Outer
    state: dict[str, Arrays] = field(default_factory=dict)

    def step(self, x: Arrays, gradients: Mapping[str, Array], rate: float | None = None) -> None:
        """Move every array of `x` that has a gradient, in place."""
        rate = self.kind.learning_rate if rate is None else rate
        for name, g in gradients.items():
            if name not in self.state:
                shapes = self.kind.state(name, x[name].shape)
                self.state[name] = {
                    key: np.full(shape, first, x[name].dtype)
                    for key, (shape, first) in shapes.items()
                }
            self.kind.advance(self.state[name])
            self.kind.step(name, x[name], g, self.state[name], rate, np.empty_like(x[name]))


@dataclass
class TwinWorker:
    """One worker: `x`, `c̃`, `a` and how far it has come."""

    x: Arrays
    buffers: Arrays
    inner: Optimizer
    copy: Arrays
    a: Arrays = field(default_factory=dict)
    gradients: int = 0
    local_step: int = 0


@dataclass
class Twin:
    """p workers and their center.

    Args:
        rule: what they do every τ steps.
        start: the center's first values, which every worker takes.
        inner: the workers' optimizer, one object each.
        gradient: `gradient(worker, step, x)`, called before each local step.
        buffers: the center's first buffers; set a worker's own through `workers[k].buffers`.
        together: elastic averaging on a synchronous center, the paper's form.
    """

    rule: Rule
    start: Mapping[str, Array]
    inner: Outer
    gradient: Gradient
    buffers: Mapping[str, Array] = field(default_factory=dict)
    together: bool = False

    def __post_init__(self) -> None:
        self.c = _copy(self.start)
        self.center_buffers = _copy(self.buffers)
        self.global_step = 0
        self.outer = Optimizer(self.rule.outer) if self.rule.outer else None
        self.workers = [
            TwinWorker(_copy(self.c), _copy(self.buffers), Optimizer(self.inner), _copy(self.c))
            for _ in range(self.rule.workers)
        ]

    def run(self, schedule: Sequence[int | Sequence[int]]) -> Iterator[list[int]]:
        """Step the workers in that order; an entry of several steps them together."""
        for entry in schedule:
            ranks = [entry] if isinstance(entry, int) else list(entry)
            for rank in ranks:
                self.local(rank)
            due = [r for r in ranks if self.workers[r].local_step % self.rule.period == 0]
            if due and (self.rule.synchronous or self.together):
                self.exchange(due)
            else:
                for rank in due:
                    self.exchange([rank])
            yield ranks

    def local(self, rank: int) -> None:
        """One local step of one worker."""
        w = self.workers[rank]
        gradients = {k: np.array(g) for k, g in self.gradient(rank, w.local_step, w.x).items()}
        if isinstance(self.rule, ElasticAverage):
            for name in gradients:
                gradients[name] += self.rule.rho * (w.x[name] - w.copy[name])
        for name, g in gradients.items():
            w.a[name] = np.asarray(w.a[name] + g) if name in w.a else g.copy()
        w.gradients += 1
        w.inner.step(w.x, gradients)
        w.local_step += 1

    def exchange(self, ranks: Sequence[int]) -> None:
        """One exchange of these workers, all with the `c` from before it."""
        before, buffers_before = _copy(self.c), _copy(self.center_buffers)
        ws = [self.workers[r] for r in ranks]
        if isinstance(self.rule, ElasticAverage):
            α = self.rule.alpha
            for w in ws:
                for k in before:
                    δ = α * (w.x[k] - before[k])
                    if self.rule.follows:
                        self.c[k] = np.array(w.x[k])
                    else:
                        self.c[k] += δ
                        w.x[k] -= δ
                w.copy = _copy(before)
        elif isinstance(self.rule, AGN) and self.outer:
            for w in ws:
                self.outer.step(self.c, {k: a / w.gradients for k, a in w.a.items()})
                w.x = _copy(self.c)
        else:
            self.c = {k: np.asarray(sum(w.x[k] for w in ws) / len(ws)) for k in before}
            for w in ws:
                w.x = _copy(self.c)
        for k, b in buffers_before.items():
            mean = len(ws) if self.rule.synchronous else self.rule.workers
            self.center_buffers[k] = np.asarray(b + sum((w.buffers[k] - b) / mean for w in ws))
        for w in ws:
            w.buffers, w.a, w.gradients = _copy(self.center_buffers), {}, 0
        self.global_step += 1 if self.rule.synchronous or self.together else len(ws)


def _copy(arrays: Mapping[str, Array]) -> Arrays:
    return {name: np.array(array) for name, array in arrays.items()}
