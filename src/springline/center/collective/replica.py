"""The center on one rank: `c`, and the buffer in which an all-reduce makes the next one.

There are two flat buffers. One holds `c`. Into the other each rank writes what it contributes, an
all-reduce adds that up, and the sum *is* the next `c`: the two change places, and nothing is
copied. In front of the parameters stands a table with a row per rank, which the same all-reduce
fills: every rank writes its own row, and zeros elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from springline.center.collective.group import Group
from springline.center.layout import ALIGNMENT, Bytes, Layout, aligned_zeros
from springline.rules.rule import Array

_COLUMNS = 6  # of the table; a float32 counts to 2²⁴ only, so that steps take two
_LOW = 1 << 20


@dataclass(frozen=True)
class Row:
    """What a rank reports of itself in a round."""

    contributes: bool
    finished: bool
    large: bool  # its contribution may make the sum overflow
    seconds: float  # spent exchanging
    steps: int


class Replica:
    """Both buffers, on the CPU; tensors must be on `device` to be sent."""

    def __init__(self, layout: Layout, ranks: int, device: torch.device) -> None:
        self._layout = layout
        shards = list(layout.shards(whole=False))
        self.blocks = [b for s in shards for b in layout.blocks(s, whole=False, elementwise=True)]
        first = shards[0].dtype if shards else "float32"
        size = ranks * _COLUMNS * np.dtype(first).itemsize
        head = -(-size // ALIGNMENT) * ALIGNMENT
        both = [aligned_zeros(head + layout.nbytes) for _ in range(2)]
        self.buffers: list[Bytes] = [whole[head:] for whole in both]
        self._tables: list[Array] = [w[:size].view(first).reshape(ranks, _COLUMNS) for w in both]
        spans = [(first, 0, head), *((s.dtype, head + s.start, head + s.stop) for s in shards)]
        self._tensors: list[list[torch.Tensor]] = [[], []]  # one all-reduce each
        for dtype, group in groupby(spans, lambda span: span[0]):
            (_, start, stop), *more = group
            stop = more[-1][2] if more else stop
            for whole, tensors in zip(both, self._tensors, strict=True):
                tensors.append(torch.from_numpy(whole[start:stop].view(dtype)))
        self._staged = [t.to(device) for t in self._tensors[0]] if device.type != "cpu" else []
        self.now = 0  # which of the two is `c`

    @property
    def next(self) -> int:
        """Which of the two becomes the next `c`."""
        return 1 - self.now

    def add_up(self, group: Group) -> None:
        """Replace what this rank contributes by the sum over all ranks."""
        tensors = self._tensors[self.next]
        for staged, tensor in zip(self._staged, tensors, strict=False):
            staged.copy_(tensor)
        group.sum(self._staged or tensors)
        for staged, tensor in zip(self._staged, tensors, strict=False):
            tensor.copy_(staged)

    def report(self, rank: int, row: Row) -> None:
        """Write this rank's row into what it contributes."""
        table = self._tables[self.next]
        table[:] = 0
        high, low = divmod(row.steps, _LOW)
        table[rank] = row.contributes, row.finished, row.large, row.seconds, low, high

    def reports(self) -> list[Row]:
        """Read all ranks' rows out of the sum."""
        return [
            Row(bool(contributes), bool(finished), bool(large), seconds, int(low + _LOW * high))
            for contributes, finished, large, seconds, low, high in self._tables[self.next].tolist()
        ]

    def scale(self, factor: float) -> None:
        """Multiply the sum; see `overflown`."""
        with np.errstate(over="ignore"):
            for block in self.blocks:
                total = block.view(self.buffers[self.next])
                np.multiply(total, factor, out=total)

    def overflown(self) -> str | None:
        """Return the name of a tensor of the sum that is not finite."""
        for block in self.blocks:
            total = block.view(self.buffers[self.next])
            finite = np.isfinite(total)
            if not finite.all():
                first = int(np.argmin(finite)) * total.itemsize
                return self._layout.name_at(block.start + first)
        return None
