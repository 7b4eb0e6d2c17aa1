"""`use_locking`, both ways, by force and not by luck; and one exchange of a worker at a time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from centers import KINDS, model, on

import forks
from springline import AGN, Worker
from springline.center import Layout, SettingsError
from springline.rules import SGD, Adagrad, Adam, Momentum, Nesterov, Outer, Rule
from springline.torch.outer import TorchOuter

START = model(v=[0, 0, 0, 0])


@dataclass(frozen=True)
class Add(Outer):
    """`c ← c + m`; between reading `c` and writing it, the worker tries to meet the other."""

    meet: Callable[[], object]
    met: list
    kind = "add"

    def step(self, now, g, exchange, then):
        np.add(now.c, g, out=then.c)
        try:
            self.meet()
            self.met.append(True)
        except threading.BrokenBarrierError:
            self.met.append(False)


@dataclass(frozen=True, kw_only=True)
class Meeting(Rule):
    """Adds `x` to the center."""

    meet: Callable[[], object]
    met: list = field(default_factory=list)
    name: ClassVar[str] = "meeting"

    @property
    def outer(self):
        return Add(self.meet, self.met)

    def contribute(self, x, a, base, n, out):
        return x

    def adopt(self, x, base, c, work):
        """Keep `x`."""


def seconds(use_locking):
    """How long to wait for the other: without a lock it comes, with one it cannot."""
    return 0.3 if use_locking else 30


@pytest.mark.parametrize("use_locking", [True, False])
@on("asynchronous", "steps_here")
def test_threads_lose_updates_only_without_locks(place, use_locking, together):
    barrier = threading.Barrier(2, timeout=seconds(use_locking))
    rule = Meeting(workers=2, meet=barrier.wait)
    workers = place.workers(START, rule, use_locking=use_locking)
    for worker in workers:
        worker.parameters["v"][:] = 1
    together(*[w.exchange for w in workers])
    assert rule.met == [not use_locking] * 2
    np.testing.assert_array_equal(workers[0].center.values()["v"], 2 if use_locking else 1)


@pytest.mark.parametrize("outer", [Momentum, Nesterov, Adagrad, Adam])
@on("asynchronous")
def test_outer_optimizers_with_state_are_refused_without_locks(place, outer):
    with pytest.raises(SettingsError, match=f"'{outer.kind}' must take its steps one at a time"):
        place.worker(START, AGN(outer=outer(0.1)), use_locking=False)


def test_what_of_torch_has_state():
    for kind, options, stateless in (
        (torch.optim.SGD, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, False),
        (torch.optim.AdamW, {}, False),
    ):
        inner = kind([torch.zeros(1)], lr=0.1, **options)
        assert TorchOuter(inner, {"v": inner.defaults}).stateless == stateless


@on("asynchronous", "steps_here")
def test_two_threads_of_one_worker_take_turns(place, together):
    rule = Meeting(meet=threading.Barrier(2, timeout=0.3).wait)
    worker = place.worker(START, rule, use_locking=False)
    worker.parameters["v"][:] = 1
    together(worker.exchange, worker.exchange)
    assert rule.met == [False, False]
    np.testing.assert_array_equal(worker.center.values()["v"], 2)
    assert worker.center.version == 2


def add_once(pipe, kind, path, rank, barrier, timeout):
    rule = Meeting(workers=2, meet=lambda: barrier.wait(timeout))
    worker = Worker(START, rule, KINDS[kind].open(path), rank)
    worker.parameters["v"][:] = 1
    pipe.send("ready")
    pipe.recv()
    worker.exchange()
    pipe.send(rule.met)


def kind_of(place):
    return next(kind for kind, cls in KINDS.items() if type(place) is cls)


@pytest.mark.parametrize("use_locking", [True, False])
@on("asynchronous", "by_path", "steps_here")
def test_processes_lose_updates_only_without_locks(place, use_locking, start):
    rule = Meeting(workers=2, meet=list)
    center = place.make(Layout.of(START), rule, START, use_locking=use_locking)
    barrier = forks.context.Barrier(2)
    arguments = [
        (kind_of(place), place.path, rank, barrier, seconds(use_locking)) for rank in (0, 1)
    ]
    pipes = [start(add_once, *args)[1] for args in arguments]
    for pipe in pipes:
        assert pipe.recv() == "ready"
    for pipe in pipes:
        pipe.send("go")
    assert [pipe.recv() for pipe in pipes] == [[not use_locking]] * 2
    np.testing.assert_array_equal(center.values()["v"], 2 if use_locking else 1)


ADDITIONS = 400
LARGE = {f"w{k}": np.zeros((150, 500), np.float32) for k in range(4)}
ADD = AGN(workers=2, period=1, outer=SGD(1.0))


def add_often(pipe, kind, path, rank):
    worker = Worker(LARGE, ADD, KINDS[kind].open(path), rank)
    pipe.send("ready")
    pipe.recv()
    for k in range(ADDITIONS):
        g = np.float32(-(k % 3) - rank)
        worker.observe({name: np.full_like(value, g) for name, value in LARGE.items()})
        worker.step()
    pipe.send("done")


@on("asynchronous", "by_path")
def test_no_addition_is_lost_under_locks(place, start):
    center = place.make(Layout.of(LARGE), ADD, LARGE)
    pipes = [start(add_often, kind_of(place), place.path, rank)[1] for rank in (0, 1)]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * 2
    for pipe in pipes:
        pipe.send("go")
    assert [pipe.recv() for pipe in pipes] == ["done"] * 2
    total = sum(k % 3 + rank for k in range(ADDITIONS) for rank in (0, 1))
    for value in center.values().values():
        np.testing.assert_array_equal(value, total)
    assert center.version == 2 * ADDITIONS
