"""The outer optimizer's state: an array per parameter and key, one after another in a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import BLOCK, Bytes, Entry, Layout, aligned
from springline.rules.outer import Outer

Spec = tuple[int, str, tuple[int, ...], float]  # parameter, key, shape, first value


@dataclass(frozen=True)
class StateEntry:
    """One array of the outer optimizer's state and its place in the region `state`."""

    parameter: int  # index of the layout's entry
    key: str
    shape: tuple[int, ...]
    first: float
    offset: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def view(self, buffer: Bytes) -> NDArray[Any]:
        """Return the array in the region `state`."""
        part = buffer[self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).reshape(self.shape)


def arrays_of(state: Iterable[StateEntry], buffer: Bytes) -> dict[int, dict[str, NDArray[Any]]]:
    """Return an outer optimizer's arrays by parameter and key."""
    arrays: dict[int, dict[str, NDArray[Any]]] = {}
    for entry in state:
        arrays.setdefault(entry.parameter, {})[entry.key] = entry.view(buffer)
    return arrays


def nbytes_of(state: tuple[StateEntry, ...]) -> int:
    """Return how long a buffer with this state is."""
    return state[-1].offset + state[-1].nbytes if state else 0


def per_block(entry: Entry, shape: tuple[int, ...], outer: Outer) -> tuple[int, ...]:
    """Return the shape of an array of state: a number is kept for each block."""
    if outer.whole or shape == entry.shape:
        return shape
    return (max(1, -(-entry.nbytes // BLOCK)),)


def place(layout: Layout, specs: Iterable[Spec]) -> tuple[StateEntry, ...]:
    """Place arrays one after another."""
    entries: list[StateEntry] = []
    offset = 0
    for parameter, key, shape, first in specs:
        dtype = layout.entries[parameter].center_dtype
        entries.append(StateEntry(parameter, key, shape, first, offset, dtype))
        offset += aligned(entries[-1].nbytes)
    return tuple(entries)
