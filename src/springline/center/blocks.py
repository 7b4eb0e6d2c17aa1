"""The four verbs over the blocks of a center: written here once, for every center."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.distance import Distance
from springline.center.layout import BLOCK, ByteRange, Bytes, Layout, aligned, aligned_zeros
from springline.center.plan import Plan
from springline.errors import AFTER_NAN, NonFiniteError
from springline.rules.buffers import buffer_rule
from springline.rules.outer import Exchange, Outer, Point
from springline.rules.rule import Rule, reduce, size

Array = NDArray[Any]
State = Mapping[int, Mapping[str, Array]]  # by parameter and key
ERRORS: Mapping[str, Any] = {"over": "raise", "invalid": "raise", "divide": "raise"}
_NONE: Array = np.empty(0)
NO_RATE = -1.0  # where none goes with a message
_MEASURED = 16  # about how many blocks a worker's distance from the center is taken from


@dataclass(slots=True)
class Block:
    """The center's side of a block, and the rule for it."""

    range: ByteRange
    rule: Rule
    outer: Outer
    name: str  # the parameter, where a block belongs to one
    measured: bool  # whether it is one of those that a worker's distance is taken from
    now: Point  # views of the center's memory
    then: Point  # scratch for the point after a step
    work: Array  # more scratch
    direct: bool  # a step is written straight into `c`, since it can be made again
    partial: bool  # any part of a step may stand alone, so that it may be made in place
    stepped: Point  # where the last step went
    small: bool = False  # whether the last message is too small to overflow `c`

    def has_gradient(self, seen: NDArray[np.bool_]) -> bool:
        """Whether there is something to contribute: of some rules only what had a gradient."""
        entry = self.range.entry
        return entry is None or not self.rule.accumulates or bool(seen[entry])

    def sent(self, rates: NDArray[np.float64] | None) -> float | None:
        """Return the learning rate that came with a message, if any."""
        entry = self.range.entry
        if rates is None or entry is None or rates[entry] < 0:
            return None
        return float(rates[entry])


@dataclass(slots=True)
class Side:
    """A worker's side of a block: views of its flat buffers."""

    x: Array
    out: Array  # room for a message
    a: Array
    base: Array
    distance: Distance


class RefusedError(ArithmeticError):
    """A block has no finite message, or it would overflow the center. It was not applied.

    Args:
        range_: the block.
        values: the message, or what there is of the result.

    Attributes:
        offset: of the first byte in the center that is not finite, as far as that is known.
    """

    def __init__(self, range_: ByteRange, values: Array) -> None:
        super().__init__("not finite")
        first = int(np.argmin(np.isfinite(values))) if values.size else 0
        self.offset = range_.start + first * values.itemsize


def contribute(block: Block, side: Side, n: int) -> Array:
    """Return a worker's message, which is finite.

    Args:
        block: the center's side.
        side: the worker's side.
        n: how many gradients an accumulated one holds.

    Raises:
        RefusedError: it is not.
    """
    try:
        message = block.rule.contribute(side.x, side.a, side.base, n, side.out)
    except FloatingPointError as error:
        raise RefusedError(block.range, side.out) from error
    check_message(block, message)
    return message


def check_message(block: Block, message: Array) -> None:
    """Refuse a message that is not finite.

    Raises:
        RefusedError: it is not.
    """
    square = size(message)
    if math.isnan(square):
        raise RefusedError(block.range, message)
    block.small = square < math.inf


def step(
    block: Block,
    messages: Sequence[Array],
    exchange: Exchange,
    rates: NDArray[np.float64] | None = None,
    count: int | None = None,
    scratch: bool = False,
) -> None:
    """Reduce messages and take the outer step; into `then`, for `commit`, or in place.

    Args:
        block: the center's side.
        messages: of a round, in rank order; or one.
        exchange: which; it learns what is the block's own.
        rates: per entry of the layout, the learning rates that came with the message.
        count: of how many messages the one given is the mean already.
        scratch: whether the message may be overwritten.

    Raises:
        RefusedError: the center would overflow. It has not changed.
    """
    exchange.name = block.name
    exchange.count = count or len(messages)
    exchange.sent = block.sent(rates)
    if exchange.sent is None or not block.rule.own_rates:
        exchange.rate = block.outer.rate(block.name, exchange.number)
    else:
        exchange.rate = exchange.sent
    weight = block.rule.weight(exchange)
    block.stepped = into = block.now if block.direct else block.then
    try:
        room = block.now.c if block.direct else block.work
        message = reduce(messages, [weight] * len(messages), room, block.work)
        may = block.partial and block.small and message is messages[0]
        work = message if scratch else block.work
        if may and block.outer.step_in_place(block.now.c, message, exchange, work):
            block.stepped = block.now
        elif message is not block.now.c:
            block.outer.step(block.now, message, exchange, into)
    except FloatingPointError as error:
        raise RefusedError(block.range, into.c) from error


def mean_rates(sent: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean of the learning rates that came with a round's messages, if all have one."""
    mean: NDArray[np.float64] = np.mean(sent, axis=0)
    mean[np.min(sent, axis=0) < 0] = NO_RATE
    return mean


def adopted(block: Block, stepped: bool, out: Array) -> Array:
    """Return the `c` that a worker adopts, before `commit`.

    Args:
        block: the center's side.
        stepped: whether `step` was called; not if there was nothing to contribute.
        out: room for it.
    """
    aside = stepped and not block.rule.adopts_seen
    return block.outer.publish(block.stepped if aside else block.now, out)


def adopt(block: Block, side: Side, c: Array) -> None:
    """Let a worker adopt what `adopted` returned."""
    measure(block, side, c)
    block.rule.adopt(side.x, side.base, c, block.work)


def measure(block: Block, side: Side, c: Array) -> None:
    """Take a worker's distance from the center, of some blocks, before it adopts them."""
    if block.measured:
        side.distance.add(side.x, c, block.work)


def commit(block: Block) -> None:
    """Put the point after a step in place."""
    if block.stepped is block.then:
        put(block.then, block.now)


def put(point: Point, into: Point) -> None:
    """Copy a point over another."""
    np.copyto(into.c, point.c)
    for key, array in into.state.items():
        np.copyto(array, point.state[key])


def take(side: Side, c: Array) -> None:
    """Go on from the center, whatever the rule."""
    np.copyto(side.x, c)
    if side.base.size:
        np.copyto(side.base, c)


class Blocks:
    """The blocks of some shards, one after another in a center's bytes.

    Args:
        plan: of the whole center.
        rule: the workers'.
        shards: some of the plan's, one after another.
        center: the bytes of the center from the first of these shards on.
        state: the outer optimizer's arrays.
        scratch: returns where the blocks of the k-th of these shards are stepped; by default one
            place for all.
    """

    def __init__(
        self,
        plan: Plan,
        rule: Rule,
        shards: Iterable[ByteRange],
        center: Bytes,
        state: State,
        scratch: Callable[[int], Bytes] | None = None,
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
        if scratch is None:
            shared = aligned_zeros(max((plan.room(r) for s in ranges for r in s), default=0))

        apart = max(1, plan.layout.nbytes // BLOCK // _MEASURED)

        number = itertools.count()

        def block(k: int, range_: ByteRange) -> Block:
            now = point(plan, range_, self.view(range_, center), state)
            name = "" if range_.entry is None else plan.layout.entries[range_.entry].name
            kind = range_.kind
            measured = kind == "parameter" and next(number) % apart == 0
            then = like(now, scratch(k) if scratch else shared)
            room, how = self._room(range_, work), (direct[kind], partial[kind])
            of = rules[kind], outers[kind], name, measured
            return Block(range_, *of, now, then, room, *how, stepped=now)

        self.shards = [[block(k, range_) for range_ in shard] for k, shard in enumerate(ranges)]

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


def shaped(plan: Plan, range_: ByteRange, part: Bytes) -> Array:
    """Return a block's bytes as its elements: flat, or in their own shape."""
    flat = part.view(range_.dtype)
    if range_.entry is None or plan.cut:
        return flat
    return flat.reshape(plan.layout.entries[range_.entry].shape)


def point(plan: Plan, range_: ByteRange, c: Array, state: State) -> Point:
    """Return a block's `c` with its part of the outer optimizer's state."""
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


def like(now: Point, scratch: Bytes) -> Point:
    """Return a point of the same shapes in scratch."""
    at = 0

    def carve(array: Array) -> Array:
        nonlocal at
        start, at = at, at + aligned(array.nbytes)
        return scratch[start : start + array.nbytes].view(array.dtype).reshape(array.shape)

    return Point(carve(now.c), {key: carve(array) for key, array in now.state.items()})


def non_finite(layout: Layout, offset: int, rank: int) -> NonFiniteError:
    """Return the error for a block that was refused, from its `RefusedError`."""
    entry = layout.entry_at(offset)
    return NonFiniteError(
        f"{entry.kind.capitalize()} {entry.name!r} of rank {rank} has NaN or Inf (or would "
        f"overflow the center), so it was not sent. {AFTER_NAN}"
    )
