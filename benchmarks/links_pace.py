"""Makes a step last as long as on a larger model, without keeping this machine's cores busy."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

FORWARD = 1 / 3  # of a step; the rest is the backward pass


class Pace:
    """Makes a step last as long as a larger one that leaves this machine's cores alone."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()

    def until(self, share: float) -> None:
        """Wait until so much of the step is over."""
        left = self._start + share * self._seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Waiting(torch.autograd.Function):
    """Nothing but time, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, there: float, back: float) -> Tensor:
        ctx.pace, ctx.back = pace, back
        pace.until(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.pace.until(ctx.back)
        return gradients[0], None, None, None


def wait(x: Tensor, pace: Pace, layer: int, layers: int) -> Tensor:
    """Wait, after a layer (the first is 1), until the step is as far; so does the backward pass."""
    there = FORWARD * layer / layers
    back = FORWARD + (1 - FORWARD) * (layers + 1 - layer) / layers
    found: Tensor = _Waiting.apply(x, pace, there, back)  # type: ignore[no-untyped-call]
    return found
