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
from springline.rules.fragments import fragment_of
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
    number: int = 0

    def step(
        self, x: Arrays, gradients: Mapping[str, Array], count: int = 1, sent: float | None = None
    ) -> None:
        """Move every array of `x` that has a gradient, in place."""
        for name, g in gradients.items():
            if name not in self.state:
                shapes = self.kind.state(name, x[name].shape)
                self.state[name] = {
                    key: np.full(shape, first, x[name].dtype)
                    for key, (shape, first) in shapes.items()
                }
            then = Point(np.empty_like(x[name]), _copy(self.state[name]))
            rate = self.kind.rate(name, self.number)
            exchange = Exchange(self.number, count, rate=rate, sent=sent, name=name)
            self.kind.step(Point(x[name], self.state[name]), g, exchange, then)
            x[name][...], self.state[name] = then


@dataclass
class TwinWorker:
    """One worker: `x`, `c̃`, `a`, how far it has come, and when it exchanges next."""

    x: Arrays
    buffers: Arrays
    inner: Optimizer
    copy: Arrays
    due: int
    a: Arrays = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)  # in `a`, by fragment
    local_step: int = 0
    pending: tuple[int, Arrays, Arrays] | None = None  # to be adopted at a step: c, and buffers


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
        global_step: where exchanges are counted from.
    """

    rule: Rule
    start: Mapping[str, Array]
    inner: Outer
    gradient: Gradient
    buffers: Mapping[str, Array] = field(default_factory=dict)
    together: bool = False
    global_step: int = 0

    def __post_init__(self) -> None:
        rule, self.c = self.rule, _copy(self.start)
        self.center_buffers = _copy(self.buffers)
        self.outer = Optimizer(rule.outer)
        self.exchanges = [0] * rule.workers
        self.others = [0] * rule.workers  # exchanges of others, at each worker's last
        sizes = {name: np.asarray(value).nbytes for name, value in self.start.items()}
        self.fragment = fragment_of(sizes, rule.fragments)
        self.gaps = rule.gaps()
        self.workers = [
            TwinWorker(_copy(self.c), _copy(self.buffers), Optimizer(self.inner), _copy(self.c), 0)
            for _ in range(rule.workers)
        ]
        for rank, w in enumerate(self.workers):
            w.due = self._gap(rank) - rule.delay

    @property
    def in_rounds(self) -> bool:
        """Whether an exchange is of all workers."""
        return self.rule.rounds or self.together

    def _gap(self, rank: int) -> int:
        """Return the steps to a worker's next exchange."""
        if self.in_rounds:
            return self.gaps.before_round(self.global_step)
        return self.gaps.at(self.workers[rank].local_step)

    def run(self, schedule: Sequence[int | Sequence[int]]) -> Iterator[list[int]]:
        """Step the workers in that order; an entry of several steps them together."""
        for entry in schedule:
            ranks = [entry] if isinstance(entry, int) else list(entry)
            for rank in ranks:
                self.local(rank)
                self._adopt_pending(rank)
            due = [r for r in ranks if self.workers[r].local_step == self.workers[r].due]
            if due and self.in_rounds:
                self.exchange(due)
            else:
                for rank in due:
                    self.exchange([rank])
            yield ranks

    def local(self, rank: int) -> None:
        """One local step of one worker."""
        w = self.workers[rank]
        gradients = {k: np.array(g) for k, g in self.gradient(rank, w.local_step, w.x).items()}
        if isinstance(self.rule, ElasticAverage) and self.rule.rho:
            for name, x in w.x.items():  # of all that is trained, with a gradient or without
                pull = self.rule.rho * (x - w.copy[name])
                gradients[name] = np.asarray(gradients.get(name, 0) + pull)
        for name, g in gradients.items():
            w.a[name] = np.asarray(w.a[name] + g) if name in w.a else g.copy()
        for fragment in self.fragment.values():
            w.gradients.setdefault(fragment, 0)
        w.gradients = {fragment: n + 1 for fragment, n in w.gradients.items()}
        w.inner.step(w.x, gradients)
        w.local_step += 1

    def exchange(self, ranks: Sequence[int]) -> None:
        """One exchange of these workers, all with the `c` from before it."""
        before, buffers_before = _copy(self.c), _copy(self.center_buffers)
        ws = [self.workers[r] for r in ranks]
        number = self.global_step if self.in_rounds else self.exchanges[ranks[0]]
        last = max(self.fragment.values())
        fragment = number % (last + 1)
        names = [k for k in before if self.fragment[k] == fragment]
        self.outer.number = self.global_step
        if isinstance(self.rule, ElasticAverage):
            α = self.rule.alpha
            for w in ws:
                for k in names:
                    δ = α * (w.x[k] - before[k])
                    if self.rule.follows:
                        self.c[k] = np.array(w.x[k])
                    else:
                        self.c[k] += δ
                        w.x[k] -= δ
                    w.copy[k] = before[k]
        elif isinstance(self.rule, AGN):
            for w in ws:
                n = w.gradients[fragment]
                self.outer.step(self.c, {k: w.a[k] / n for k in names if k in w.a})
                w.x |= _copy({k: self.c[k] for k in names})
        elif isinstance(self.rule, ModelAverage):
            for k in names:
                self.c[k] = np.asarray(sum(w.x[k] for w in ws) / len(ws))
            for w in ws:
                w.x |= _copy({k: self.c[k] for k in names})
        else:
            self._four_verbs(ranks, names)
        if fragment == last:
            for k, b in buffers_before.items():
                mean = len(ws) if self.in_rounds else self.rule.workers
                self.center_buffers[k] = np.asarray(b + sum((w.buffers[k] - b) / mean for w in ws))
            for w in ws:
                if w.pending:
                    w.pending = *w.pending[:2], _copy(self.center_buffers)
                else:
                    w.buffers = _copy(self.center_buffers)
        for w in ws:
            w.a = {k: a for k, a in w.a.items() if k not in names}
            w.gradients[fragment] = 0
        self.global_step += 1 if self.in_rounds else len(ws)
        for r, w in zip(ranks, ws, strict=True):
            self.exchanges[r] += 1
            w.due = w.local_step + self._gap(r)

    def _four_verbs(self, ranks: Sequence[int], names: Sequence[str]) -> None:
        rule, before = self.rule, _copy(self.c)
        others = self.global_step - self.exchanges[ranks[0]]
        exchange = Exchange(self.global_step, len(ranks), others - self.others[ranks[0]])
        messages: dict[str, list[Array]] = {k: [] for k in names}
        for w in (self.workers[r] for r in ranks):
            for k in names:
                x = w.x[k]
                a, base = w.a.get(k, np.empty(0)), w.copy[k] if rule.keeps_base else np.empty(0)
                if not rule.accumulates or k in w.a:
                    n = w.gradients[self.fragment[k]]
                    m = rule.contribute(x, a, base, n, np.empty_like(x))
                    messages[k].append(np.array(m) * rule.weight(exchange))
        means = {k: np.asarray(sum(ms) / len(ms)) for k, ms in messages.items() if ms}
        sent = self.inner.rate("", 0) if rule.sends_rates else None
        self.outer.step(self.c, means, len(ranks), sent)
        for r in ranks:
            self.others[r], w = others, self.workers[r]
            adopted = {}
            for k in names:
                point = Point(self.c[k], self.outer.state.get(k, {}))
                new = rule.outer.publish(point, np.empty_like(w.x[k]))
                adopted[k] = np.array(before[k] if rule.adopts_seen else new)
            w.pending = w.local_step + rule.delay, adopted, {}
            self._adopt_pending(r)

    def _adopt_pending(self, rank: int) -> None:
        """Let a worker adopt what it has contributed to, if that is due."""
        w = self.workers[rank]
        if w.pending is None or w.local_step < w.pending[0]:
            return
        _, adopted, buffers = w.pending
        w.pending = None
        for k, c in adopted.items():
            base = w.copy[k] if self.rule.keeps_base else np.empty(0)
            self.rule.adopt(w.x[k], base, c, np.empty_like(c))
        w.buffers |= _copy(buffers)


def _copy(arrays: Mapping[str, Array]) -> Arrays:
    return {name: np.array(array) for name, array in arrays.items()}
