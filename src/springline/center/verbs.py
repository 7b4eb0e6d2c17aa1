"""The four verbs over one block of a center: written here once, for every center."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import ByteRange, Layout
from springline.center.local import NO_RATE, Distance
from springline.errors import AFTER_NAN, NonFiniteError
from springline.rules.outer import Exchange, Outer, Point
from springline.rules.rule import Rule, reduce, size

Array = NDArray[Any]
ERRORS: Mapping[str, Any] = {"over": "raise", "invalid": "raise", "divide": "raise"}


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


def non_finite(layout: Layout, offset: int, rank: int) -> NonFiniteError:
    """Return the error for a block that was refused, from its `RefusedError`."""
    entry = layout.entry_at(offset)
    return NonFiniteError(
        f"{entry.kind.capitalize()} {entry.name!r} of rank {rank} has NaN or Inf (or would "
        f"overflow the center), so it was not sent. {AFTER_NAN}"
    )
