"""One worker's flat buffers, and how far they are from the center."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import Bytes, Layout, aligned_zeros
from springline.rules.rule import Rule

Array = NDArray[Any]
NO_RATE = -1.0  # where none goes with a message


class Distance:
    """`‖x − c‖/‖c‖` of an exchange, added up from some of its blocks while they are in cache."""

    def __init__(self) -> None:
        self._apart = self._size = 0.0

    def add(self, x: Array, c: Array, work: Array) -> None:
        """Add a block, before the worker adopts it."""
        with np.errstate(all="ignore"):
            flat = np.subtract(x, c, out=work).ravel()
            self._apart += float(np.dot(flat, flat))
            self._size += float(np.dot(c.ravel(), c.ravel()))

    def take(self) -> float:
        """Return what was added up, and begin again."""
        apart, size = self._apart, self._size
        self._apart = self._size = 0.0
        return math.sqrt(apart / size) if size > 0 and math.isfinite(apart / size) else math.nan


class Local:
    """One worker's flat buffers, laid out as the center is.

    Args:
        layout: the model's.
        rule: decides which buffers there are.
        allocate: makes a buffer of so many bytes, all zero.

    Attributes:
        x: the worker's parameters and buffers.
        a: its accumulated gradient, if the rule has one.
        base: `c̃`, if the rule keeps it.
        gradients: how many gradients `a` holds, per fragment.
        seen: per entry, whether `a` holds a gradient for it; where not, its part of `a` is void.
        rates: per entry, the learning rate that goes with a message; `NO_RATE` for none.
        steps: local steps of the worker's rank, across restarts.
        speed: local steps per second since the last exchange, if the rule asks.
        distance: how far it is from the center, `‖x − c‖/‖c‖`, at an exchange.
    """

    def __init__(
        self, layout: Layout, rule: Rule, allocate: Callable[[int], Bytes] = aligned_zeros
    ) -> None:
        self.layout = layout
        self.x: Bytes = allocate(layout.nbytes)
        self.a: Bytes | None = allocate(layout.nbytes) if rule.accumulates else None
        self.base: Bytes | None = allocate(layout.nbytes) if rule.keeps_base else None
        self._fragments = np.array([e.fragment for e in layout.entries])
        self.gradients: NDArray[np.int64] = np.zeros(layout.fragments, np.int64)
        self.seen: NDArray[np.bool_] = np.zeros(len(layout.entries), bool)
        self.rates: NDArray[np.float64] = np.full(len(layout.entries), NO_RATE)
        self.steps = 0
        self.speed = 0.0
        self.distance = Distance()

    def forget_gradients(self, fragment: int | None = None) -> None:
        """`a ← 0`, of one fragment or of all, without touching its memory."""
        if fragment is None:
            self.gradients[:] = 0
            self.seen[:] = False
        else:
            self.gradients[fragment] = 0
            self.seen[self._fragments == fragment] = False
