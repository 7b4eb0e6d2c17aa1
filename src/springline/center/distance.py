"""How far a worker is from its center: the figure that shows whether the period is too long."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


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
