"""The center on one rank: `c`, the outer optimizer's state, and the buffer of an all-reduce.

Each rank writes its message, divided by the number of ranks, into the buffer; an all-reduce adds
them up. In front of the messages stands a table with a row per rank, which the same all-reduce
fills: every rank writes its own row, and zeros elsewhere; and the learning rates that go with the
messages.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from springline.center.collective.group import Group
from springline.center.layout import Bytes, aligned, aligned_zeros
from springline.center.plan import Plan
from springline.rules.rule import Array

_COLUMNS = 8  # of the table; a float32 counts to 2²⁴ only, so that large numbers take two
_LOW = 1 << 20


@dataclass(frozen=True)
class RankReport:
    """What a rank reports of itself in a round."""

    contributes: bool
    finished: bool
    may_overflow: bool  # its contribution may make the sum do so
    seconds: float  # spent exchanging
    steps: int
    checksum: int = 0  # of the center before the round; 0 in most


class Replica:
    """The buffers, on the CPU; tensors must be on `device` to be sent."""

    def __init__(self, plan: Plan, ranks: int, device: torch.device) -> None:
        self._layout = plan.layout
        self._ranges = [
            [range_ for k in shards for range_ in plan.blocks(plan.shards[k])]
            for shards in plan.fragments
        ]
        self.center = plan.layout.allocate()
        self.state = aligned_zeros(plan.state_nbytes)
        for s in plan.state:
            s.view(self.state).fill(s.first)
        first = plan.shards[0].dtype if plan.shards else "float32"
        count, entries = ranks * _COLUMNS, len(plan.layout.entries)
        head = aligned((count + entries) * np.dtype(first).itemsize)
        both = aligned_zeros(head + plan.layout.nbytes)
        self.messages: Bytes = both[head:]
        numbers: Array = both[:head].view(first)
        self._table = numbers[:count].reshape(ranks, _COLUMNS)
        self.rates = numbers[count : count + entries]
        self._tensors: list[list[torch.Tensor]] = []  # per fragment; one all-reduce each
        for fragment in plan.fragments:
            spans = [(first, 0, head)]
            for shard in (plan.shards[k] for k in fragment):
                dtype, start, stop = spans[-1]
                if dtype == shard.dtype and head + shard.start <= aligned(stop):
                    spans[-1] = dtype, start, head + shard.stop
                else:
                    spans.append((shard.dtype, head + shard.start, head + shard.stop))
            tensors = [torch.from_numpy(both[a:b].view(dtype)) for dtype, a, b in spans]
            self._tensors.append(tensors)
        on_cpu = device.type == "cpu"
        self._staged = [] if on_cpu else [[t.to(device) for t in ts] for ts in self._tensors]

    def add_up(self, group: Group, fragment: int) -> None:
        """Replace what this rank contributes to a fragment by the sum over all ranks."""
        tensors = self._tensors[fragment]
        staged = self._staged[fragment] if self._staged else []
        for there, here in zip(staged, tensors, strict=False):
            there.copy_(here)
        group.sum(staged or tensors)
        for there, here in zip(staged, tensors, strict=False):
            here.copy_(there)

    def checksum(self) -> int:
        """Return a checksum of the center and its state."""
        return zlib.crc32(self.state.data, zlib.crc32(self.center.data)) or 1

    def report(self, rank: int, row: RankReport) -> None:
        """Write this rank's row into what it contributes."""
        self._table[:] = 0
        steps, check = divmod(row.steps, _LOW), divmod(row.checksum, _LOW)
        self._table[rank] = (
            row.contributes,
            row.finished,
            row.may_overflow,
            row.seconds,
            *steps,
            *check,
        )

    def reports(self) -> list[RankReport]:
        """Read all ranks' rows out of the sum."""
        return [
            RankReport(
                contributes=bool(row[0]),
                finished=bool(row[1]),
                may_overflow=bool(row[2]),
                seconds=row[3],
                steps=int(_LOW * row[4] + row[5]),
                checksum=int(_LOW * row[6] + row[7]),
            )
            for row in self._table.tolist()
        ]

    def scale(self, factor: float, fragment: int) -> None:
        """Multiply the sum of a fragment; see `overflown`."""
        with np.errstate(over="ignore"):
            for range_ in self._ranges[fragment]:
                total = range_.view(self.messages)
                np.multiply(total, factor, out=total)

    def overflown(self, fragment: int) -> str | None:
        """Return the name of a tensor of a fragment's sum that is not finite."""
        for range_ in self._ranges[fragment]:
            total = range_.view(self.messages)
            finite = np.isfinite(total)
            if not finite.all():
                first = int(np.argmin(finite)) * total.itemsize
                return self._layout.entry_at(range_.start + first).name
        return None
