"""The slow twin: p workers and a center in one plain loop. Everything else must agree with it.

No blocks, no locks, no clever memory: the formulas of the three first rules, written out again, on
dictionaries of arrays; of any other rule the four verbs, one after another, on whole arrays. Front
ends and centers are compared with the rows it yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.rules.agn import AGN
from springline.rules.average import ModelAverage
from springline.rules.elastic import ElasticAverage
from springline.rules.outer import Exchange, Outer, Point
from springline.rules.rule import Rule

Array = NDArray[Any]
Arrays = dict[str, Array]
Gradient = Callable[[int, int, Arrays], Mapping[str, Array]]


@dataclass
class Optimizer:
    """Any outer optimizer with its own state: an inner optimizer, or the center's."""

    kind: Outer
    state: dict[str, Mapping[str, Array]] = field(default_factory=dict)

    def step(self, x: Arrays, gradients: Mapping[str, Array], count: int = 1) -> None:
        """Move every array of `x` that has a gradient, in place."""
        rate = self.kind.learning_rate
        for name, g in gradients.items():
            if name not in self.state:
                shapes = self.kind.state(name, x[name].shape)
                self.state[name] = {
                    key: np.full(shape, first, x[name].dtype)
                    for key, (shape, first) in shapes.items()
                }
            then = Point(np.empty_like(x[name]), _copy(self.state[name]))
            exchange = Exchange(rate=rate, count=count, name=name)
            self.kind.step(Point(x[name], self.state[name]), g, exchange, then)
            x[name][...], self.state[name] = then


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
        self.outer = Optimizer(self.rule.outer)
        self.exchanges = [0] * self.rule.workers
        self.others = [0] * self.rule.workers  # exchanges of others, at each worker's last
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
            if due and (self.rule.rounds or self.together):
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
        elif isinstance(self.rule, AGN):
            for w in ws:
                self.outer.step(self.c, {k: a / w.gradients for k, a in w.a.items()})
                w.x = _copy(self.c)
        elif isinstance(self.rule, ModelAverage):
            self.c = {k: np.asarray(sum(w.x[k] for w in ws) / len(ws)) for k in before}
            for w in ws:
                w.x = _copy(self.c)
        else:
            self._four_verbs(ranks)
        for k, b in buffers_before.items():
            mean = len(ws) if self.rule.rounds or self.together else self.rule.workers
            self.center_buffers[k] = np.asarray(b + sum((w.buffers[k] - b) / mean for w in ws))
        for w in ws:
            w.buffers, w.a, w.gradients = _copy(self.center_buffers), {}, 0
        self.global_step += 1 if self.rule.rounds or self.together else len(ws)

    def _four_verbs(self, ranks: Sequence[int]) -> None:
        rule, before = self.rule, _copy(self.c)
        others = self.global_step - self.exchanges[ranks[0]]
        exchange = Exchange(self.global_step, len(ranks), others - self.others[ranks[0]])
        messages: dict[str, list[Array]] = {k: [] for k in before}
        for w in (self.workers[r] for r in ranks):
            for k, x in w.x.items():
                a, base = w.a.get(k, np.empty(0)), w.copy[k] if rule.keeps_base else np.empty(0)
                if not rule.accumulates or k in w.a:
                    m = rule.contribute(x, a, base, w.gradients, np.empty_like(x))
                    messages[k].append(np.array(m) * rule.weight(exchange))
        means = {k: np.asarray(sum(ms) / len(ms)) for k, ms in messages.items() if ms}
        self.outer.step(self.c, means, len(ranks))
        for r in ranks:
            self.others[r], w = others, self.workers[r]
            self.exchanges[r] += 1
            for k, x in w.x.items():
                point = Point(self.c[k], self.outer.state.get(k, {}))
                new = rule.outer.publish(point, np.empty_like(x))
                base = w.copy[k] if rule.keeps_base else np.empty(0)
                rule.adopt(x, base, before[k] if rule.adopts_seen else new, np.empty_like(x))


def _copy(arrays: Mapping[str, Array]) -> Arrays:
    return {name: np.array(array) for name, array in arrays.items()}
