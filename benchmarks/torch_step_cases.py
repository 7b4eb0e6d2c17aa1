"""What the torch benchmark times, each case in a process of its own.

Bare is the inner optimizer itself, on the same tensors: where a process's memory happens to lie
moves the speed of a model by more than all that is measured here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from springline import SharedCenter
from springline.torch import (
    AGNOptimizer,
    DiLoCoOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
)
from springline.torch.optimizer import CenterOptimizer

NEVER = 10**12  # a period: no exchange falls due
PERIOD = 10  # of the training steps
BATCH = 16
TINY_STEPS = 200  # of the tiny model, timed together
Kind = Literal["step", "tiny step", "exchange", "training"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-6),
}
RULES: dict[str, Callable[..., CenterOptimizer]] = {
    "elastic": ElasticAverageOptimizer,
    "averaging": ModelAverageOptimizer,
    "AGN": AGNOptimizer,
}
ALL = RULES | {"DiLoCo": DiLoCoOptimizer}  # which is measured in training only


@dataclass(frozen=True)
class Case:
    """One setting. `pairs` times the bare thing and ours are timed, one after the other."""

    kind: Kind
    rule: str
    optimizer: str
    threads: int
    layers: int
    width: int
    pairs: int
    overlap: bool = False
    delay: int = 0

    @property
    def in_background(self) -> str:
        """How the exchange is hidden, if it is."""
        return "overlap" if self.overlap else f"delay {self.delay}" if self.delay else ""

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.width * (self.width + 1)

    @property
    def what(self) -> str:
        """Name the case in a few words."""
        hidden = f", {self.in_background}" if self.in_background else ""
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        return f"{self.kind}: {self.rule}{hidden}, {self.optimizer}, {threads}"


@dataclass
class Times:
    """Seconds, pair by pair."""

    bare: list[float] = field(default_factory=list)  # or memcpys
    ours: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)  # AGN: one `a += g` each


def measure(case: Case) -> Times:
    """Time a case, in this process."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(7)
    times = {"step": _step, "tiny step": _step, "exchange": _exchange, "training": _training}
    return times[case.kind](case)


def _step(case: Case) -> Times:
    """Steps of the optimizer that do not exchange."""
    many = TINY_STEPS if case.kind == "tiny step" else 1
    model = _with_gradients(case)
    with _wrapped(case, model, NEVER) as ours:

        def steps(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
            def run() -> None:
                for _ in range(many):
                    optimizer.step()

            return run

        times = _alternate(steps(ours.inner), steps(ours), case.pairs)
        times.passes = _passes(case, model, many)
    times.bare = [seconds / many for seconds in times.bare]
    times.ours = [seconds / many for seconds in times.ours]
    return times


def _exchange(case: Case) -> Times:
    """Exchanges with a shared center, against memcpys of the model."""
    model = _with_gradients(case)
    source = np.ones(case.parameters, np.float32)
    target = np.empty_like(source)
    times = Times()
    with _wrapped(case, model, NEVER) as ours:
        for n in range(case.pairs + 2):  # the first ones make views and fault pages in
            copy = _timed(lambda: np.copyto(target, source))
            ours.step()  # as in training, an exchange comes right after a step
            exchange = _timed(ours.worker.exchange)
            if n >= 2:
                times.bare.append(copy)
                times.ours.append(exchange)
    return times


def _training(case: Case) -> Times:
    """Whole periods of training: forward, backward, step. The exchange is in their middle."""
    model = _model(case)
    x, y = torch.randn(2, BATCH, case.width)
    with _wrapped(case, model, PERIOD) as ours:
        for _ in range(PERIOD // 2):
            _train(model, ours, x, y)

        def bare_period() -> None:
            for _ in range(PERIOD):
                _train(model, ours.inner, x, y)

        def our_period() -> None:
            for _ in range(PERIOD):
                _train(model, ours, x, y)
            ours.wait()  # nothing is in flight in the bare period

        times = _alternate(bare_period, our_period, case.pairs)
        times.passes = _passes(case, model, 1)
    times.bare = [seconds / PERIOD for seconds in times.bare]
    times.ours = [seconds / PERIOD for seconds in times.ours]
    return times


def _passes(case: Case, model: nn.Module, many: int) -> list[float]:
    """Time what AGN may add to a step."""
    if case.rule != "AGN":
        return []
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sums = [torch.zeros_like(g) for g in gradients]

    def add() -> None:
        for _ in range(many):
            torch._foreach_add_(sums, gradients)

    _timed(add)
    return [_timed(add) / many for _ in range(case.pairs)]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def _model(case: Case) -> nn.Sequential:
    layers = (
        (nn.Linear(case.width, case.width, dtype=torch.float32), nn.ReLU())
        for _ in range(case.layers)
    )
    return nn.Sequential(*(part for layer in layers for part in layer))


def _with_gradients(case: Case) -> nn.Sequential:
    model = _model(case)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    return model


@contextmanager
def _wrapped(case: Case, model: nn.Module, period: int) -> Iterator[CenterOptimizer]:
    """Wrap an optimizer of the model; its center is a shared one, and is freed at the end."""
    with tempfile.TemporaryDirectory(prefix="springline-bench-") as home:
        inner = OPTIMIZERS[case.optimizer](model.parameters())
        options = {"delay": case.delay} if case.delay else {"overlap": case.overlap}
        center_at = Path(home) / "center"
        ours = ALL[case.rule](inner, period=period, model=model, center=center_at, **options)
        try:
            yield ours
        finally:
            ours.finish()
            center = ours.worker.center
            if isinstance(center, SharedCenter):
                center.retire()


def _alternate(bare: Callable[[], None], ours: Callable[[], None], pairs: int) -> Times:
    """Time both, one after the other; who is first changes with every pair."""
    times = Times()
    for warm_up in (bare, ours):
        warm_up()
    for n in range(pairs):
        if n % 2:
            times.ours.append(_timed(ours))
            times.bare.append(_timed(bare))
        else:
            times.bare.append(_timed(bare))
            times.ours.append(_timed(ours))
    return times


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
