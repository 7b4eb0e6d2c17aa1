"""A center's bytes as blocks, and a worker's buffers beside them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import BLOCK, ByteRange, Bytes, aligned, aligned_zeros
from springline.center.local import Distance
from springline.center.plan import Plan
from springline.center.verbs import Block, Side
from springline.rules.buffers import buffer_rule
from springline.rules.outer import Point
from springline.rules.rule import Rule

Array = NDArray[Any]
State = Mapping[int, Mapping[str, Array]]  # by parameter and key
Points = list[tuple[Point, Point]]  # of blocks, as they are and as they are stepped
_NONE: Array = np.empty(0)
_MEASURED = 16  # about how many blocks a worker's distance from the center is taken from


class Blocks:
    """The blocks of some shards, one after another in a center's bytes.

    Args:
        plan: of the whole center.
        rule: the workers'.
        shards: some of the plan's, one after another.
        center: the bytes of the center from the first of these shards on.
        state: the outer optimizer's arrays.
        points: of each of these shards' blocks; by default all are stepped in the same scratch.
    """

    def __init__(
        self,
        plan: Plan,
        rule: Rule,
        shards: Iterable[ByteRange],
        center: Bytes,
        state: State,
        points: Sequence[Points] | None = None,
    ) -> None:
        self._plan = plan
        shards = list(shards)
        self._base = shards[0].start if shards else 0
        ranges = [plan.blocks(shard) for shard in shards]
        self._longest = max((range_.nbytes for shard in ranges for range_ in shard), default=0)
        rules = {"parameter": rule, "buffer": buffer_rule(rule, plan.rounds)}
        outers = {kind: r.outer for kind, r in rules.items()}
        direct = {k: r.outer.replaces and not r.adopts_seen for k, r in rules.items()}
        partial = {k: not (plan.journaled or r.adopts_seen) for k, r in rules.items()}
        work = aligned_zeros(self._longest)
        if points is None:
            scratch = aligned_zeros(max((plan.room(r) for s in ranges for r in s), default=0))
            points = [points_of(plan, s, center, state, scratch, self._base) for s in ranges]
        apart = max(1, plan.layout.nbytes // BLOCK // _MEASURED)
        number = itertools.count()

        def block(range_: ByteRange, now: Point, then: Point) -> Block:
            name = "" if range_.entry is None else plan.layout.entries[range_.entry].name
            kind = range_.kind
            measured = kind == "parameter" and next(number) % apart == 0
            room, how = self._room(range_, work), (direct[kind], partial[kind])
            of = rules[kind], outers[kind], name, measured
            return Block(range_, *of, now, then, room, *how, stepped=now)

        self.shards = [
            [block(range_, *its) for range_, its in zip(shard, of_shard, strict=True)]
            for shard, of_shard in zip(ranges, points, strict=True)
        ]

    def view(self, range_: ByteRange, buffer: Bytes) -> Array:
        """Return a block's elements in a buffer like the center's: flat, or in their own shape."""
        part = buffer[range_.start - self._base : range_.stop - self._base]
        return shaped(self._plan, range_, part)

    def bind(
        self,
        x: Bytes,
        a: Bytes | None = None,
        base: Bytes | None = None,
        out: Bytes | None = None,
        distance: Distance | None = None,
    ) -> list[list[Side]]:
        """Lay a worker's buffers beside the blocks; messages are made in `out`, or in scratch."""
        scratch, distance = aligned_zeros(self._longest), distance or Distance()

        def side(range_: ByteRange) -> Side:
            return Side(
                self.view(range_, x),
                self._room(range_, scratch) if out is None else self.view(range_, out),
                _NONE if a is None else self.view(range_, a),
                _NONE if base is None else self.view(range_, base),
                distance,
            )

        return [[side(block.range) for block in shard] for shard in self.shards]

    def publish(self, shard: int, out: Bytes) -> None:
        """Write what workers are given for a shard into a buffer like the center's."""
        for block in self.shards[shard]:
            into = self.view(block.range, out)
            np.copyto(into, block.outer.publish(block.now, into))

    def _room(self, range_: ByteRange, room: Bytes) -> Array:
        return shaped(self._plan, range_, room[: range_.nbytes])


def points_of(
    plan: Plan,
    blocks: Iterable[ByteRange],
    center: Bytes,
    state: State,
    scratch: Bytes,
    base: int = 0,
) -> Points:
    """Return each block as it is in `center`, whose bytes begin at `base`, and in scratch."""
    found: Points = []
    for range_ in blocks:
        now = point_of(plan, range_, center, state, base)
        found.append((now, _like(now, scratch)))
    return found


def shaped(plan: Plan, range_: ByteRange, part: Bytes) -> Array:
    """Return a block's bytes as its elements: flat, or in their own shape."""
    flat = part.view(range_.dtype)
    if range_.entry is None or plan.cut:
        return flat
    return flat.reshape(plan.layout.entries[range_.entry].shape)


def point_of(plan: Plan, range_: ByteRange, center: Bytes, state: State, base: int = 0) -> Point:
    """Return a block's `c`, in a buffer that begins at `base`, with its part of the state."""
    c = shaped(plan, range_, center[range_.start - base : range_.stop - base])
    if range_.entry is None:
        return Point(c, {})
    arrays = state.get(range_.entry, {})
    if plan.cut:
        entry = plan.layout.entries[range_.entry]
        first = (range_.start - entry.offset) // c.itemsize
        number = (range_.start - entry.offset) // BLOCK
        arrays = {
            key: array.reshape(-1)[first : first + c.size]
            if array.shape == entry.shape
            else array[number : number + 1]
            for key, array in arrays.items()
        }
    return Point(c, arrays)


def _like(now: Point, scratch: Bytes) -> Point:
    """Return a point of the same shapes in scratch."""
    at = 0

    def carve(array: Array) -> Array:
        nonlocal at
        start, at = at, at + aligned(array.nbytes)
        return scratch[start : start + array.nbytes].view(array.dtype).reshape(array.shape)

    return Point(carve(now.c), {key: carve(array) for key, array in now.state.items()})
