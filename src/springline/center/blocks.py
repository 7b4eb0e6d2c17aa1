"""A rule's blocks in a center's memory, or in a part of it, and in a worker's buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.errors import AFTER_NAN, NonFiniteError
from springline.center.layout import Bytes, Layout, Run, aligned_zeros
from springline.center.plan import Plan
from springline.rules.buffers import buffer_rule
from springline.rules.rule import CenterBlock, LocalBlock, Rule, size

State = Mapping[int, Mapping[str, NDArray[Any]]]  # by parameter and key


@dataclass(slots=True)
class Block:
    """The two sides of a block, and the rule for it."""

    run: Run
    rule: Rule
    local: LocalBlock
    center: CenterBlock


class Part:
    """The blocks of some shards, all in one run of a center's bytes.

    Args:
        plan: of the whole center.
        rule: the workers'.
        shards: some of the plan's, one after another.
        center: the bytes of the center from the first of these shards on.
        state: the outer optimizer's arrays.
    """

    def __init__(
        self, plan: Plan, rule: Rule, shards: Iterable[Run], center: Bytes, state: State
    ) -> None:
        self._layout = plan.layout
        shards = list(shards)
        self._base = shards[0].start if shards else 0
        self._elementwise = rule.outer is None or rule.outer.elementwise
        self._rules = {"parameter": rule, "buffer": buffer_rule(rule)}
        runs = [list(plan.layout.blocks(s, plan.whole, self._elementwise)) for s in shards]
        longest = max((run.stop - run.start for shard in runs for run in shard), default=0)
        self._longest = longest
        work = aligned_zeros(longest)

        def bind(run: Run) -> tuple[Run, Rule, CenterBlock]:
            entry = None if run.entry is None else plan.layout.entries[run.entry]
            arrays = {} if run.entry is None else state.get(run.entry, {})
            if entry and self._elementwise:
                start = (run.start - entry.offset) // np.dtype(run.dtype).itemsize
                part = slice(start, start + (run.stop - run.start) // np.dtype(run.dtype).itemsize)
                arrays = {
                    key: array.reshape(-1)[part] if array.shape == entry.shape else array
                    for key, array in arrays.items()
                }
            c, room = self.view(run, center), self._room(run, work)
            name = entry.name if entry else ""
            return run, self._rules[run.kind], CenterBlock(c, room, arrays, name)

        self.shards = [[bind(run) for run in shard] for shard in runs]

    def view(self, run: Run, buffer: Bytes) -> NDArray[Any]:
        """Return a block's elements in a buffer like the center's: flat, or in their own shape."""
        return self._shaped(run, buffer[run.start - self._base : run.stop - self._base])

    def room(self) -> Bytes:
        """Return scratch for one block at a time."""
        return aligned_zeros(self._longest)

    def bind(
        self, x: Bytes, room: Bytes, a: Bytes | None = None, copy: Bytes | None = None
    ) -> list[list[Block]]:
        """Lay a worker's buffers beside the center's blocks."""

        def block(run: Run, rule: Rule, center: CenterBlock) -> Block:
            mine = LocalBlock(self.view(run, x), self._room(run, room))
            if copy is not None:
                mine.copy = self.view(run, copy)
            if a is not None:
                mine.a = self.view(run, a)
            return Block(run, rule, mine, center)

        return [[block(*bound) for bound in shard] for shard in self.shards]

    def _room(self, run: Run, room: Bytes) -> NDArray[Any]:
        return self._shaped(run, room[: run.stop - run.start])

    def _shaped(self, run: Run, part: Bytes) -> NDArray[Any]:
        flat = part.view(run.dtype)
        if run.entry is None or self._elementwise:
            return flat
        return flat.reshape(self._layout.entries[run.entry].shape)


class RefusedError(ArithmeticError):
    """A block has no finite message, or it would overflow the center. It was not applied.

    Args:
        values: the message, or what there is of it.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        super().__init__("not finite")
        self.values = values


def make_message(block: Block, gradients: int, c: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return a block's message, which is finite.

    Args:
        block: whose.
        gradients: how many an accumulated one holds.
        c: the center, if it is not to be the block's own.

    Raises:
        RefusedError: it is not.
    """
    try:
        c = block.center.c if c is None else c
        message = block.rule.contribute(block.local, c, gradients)
    except FloatingPointError as error:
        raise RefusedError(block.local.message) from error
    square = size(message)
    if math.isnan(square):
        raise RefusedError(message)
    block.local.large = square == math.inf
    return message


def merge_message(block: Block, message: NDArray[Any], rate: float) -> None:
    """Bring a message into the center.

    Raises:
        RefusedError: the center would overflow.
    """
    block.center.large = block.local.large
    if block.run.opens and block.rule.outer:
        block.rule.outer.advance(block.center.state)
    try:
        block.rule.merge(block.center, (message,), rate)
    except FloatingPointError as error:
        raise RefusedError(message) from error


def non_finite(layout: Layout, run: Run, values: NDArray[Any], rank: int) -> NonFiniteError:
    """Return the error for a block that has no finite message; `values` tell where."""
    if run.entry is not None:
        name = layout.entries[run.entry].name
    else:
        first = int(np.argmin(np.isfinite(values)))
        name = layout.name_at(run.start + first * values.itemsize)
    return NonFiniteError(
        f"{run.kind.capitalize()} {name!r} of rank {rank} has NaN or Inf (or would "
        f"overflow the center), so it was not sent. {AFTER_NAN}"
    )
