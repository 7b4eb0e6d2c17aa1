"""What workers, shards and the head send each other, and how shards divide the center."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import ByteRange, Bytes
from springline.center.plan import Plan

_FINER = 4  # how many of the layout's shards one of ours holds, about


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has come with one of its exchanges.

    Args:
        incarnation: grows with every restart of the rank.
        number: of the exchange; grows within an incarnation.
        steps: local steps of the rank, across restarts.
        exchanges: of the rank, across restarts, this one included.
        seconds: spent in exchanges, across restarts.
        speed: local steps per second.
    """

    incarnation: int = 0
    number: int = 0
    steps: int = 0
    exchanges: int = 0
    seconds: float = 0.0
    speed: float = 0.0

    @property
    def at(self) -> tuple[int, int]:
        """Incarnation and number, by which a shard recognises a retry."""
        return self.incarnation, self.number

    def to_json(self) -> list[Any]:
        """Return what `RankProgress(*values)` takes."""
        return [self.incarnation, self.number, self.steps, self.exchanges, float(self.seconds)]


@dataclass(frozen=True)
class Sender:
    """A worker at one of its exchanges.

    Args:
        rank: the worker's.
        row: how far the rank has come with this exchange.
        others: exchanges that the others had made when it joined.
    """

    rank: int
    row: RankProgress
    others: int = 0

    def counted_as(self, before: RankProgress) -> Sender:
        """Return it without this exchange: as far as the rank had come before."""
        row = replace(self.row, steps=before.steps, exchanges=before.exchanges)
        return replace(self, row=row)


@dataclass(frozen=True)
class Trouble:
    """What a shard reports to the launcher.

    Args:
        incarnation: another one after every restart.
        failed: why its last checkpoint could not be written, if it could not.
        lost: exchanges that it had applied and lost in a restart.
    """

    incarnation: str
    failed: str | None
    lost: int


@dataclass(frozen=True)
class Message:
    """What a worker sends to one shard.

    Args:
        sender: whose.
        fragment: of the model; the message is about nothing else.
        data: the shard's part of that.
        seen: per entry of the layout, whether it has a gradient.
        rates: per entry, the learning rate that goes with it; `NO_RATE` for none.
    """

    sender: Sender
    fragment: int
    data: Bytes
    seen: NDArray[np.bool_]
    rates: NDArray[np.float64]


@dataclass(frozen=True)
class Reply:
    """What comes back.

    Args:
        data: the shard's part: what each block's rule adopts, `c` before the step or after it.
        refused: of each block that was not applied, since it was not finite, a byte of the center.
        forgotten: the exchange was applied, but what `c` was before it is not known any more:
            `data` is the center now, for the worker to go on from.
    """

    data: Bytes
    refused: tuple[int, ...] = ()
    forgotten: bool = False


@dataclass(frozen=True)
class ClosedRound:
    """A round that the head has closed.

    Args:
        number: its.
        contributors: whose messages its mean is of; none if that is not known any more: of those
            that a shard has.
        signature: the head's.
    """

    number: int
    contributors: list[int]
    signature: int = 0


@dataclass
class Look:
    """What the head knows."""

    members: list[int]
    rows: dict[int, RankProgress]  # as of the members' last heartbeats
    closed: int  # the last closed round
    description: dict[str, Any]
    finished: list[int]  # ranks that have made all their steps
    given_up: list[int] | None  # ranks that the launcher does not restart, if there is one


def latest(
    found: Sequence[tuple[dict[int, RankProgress], int]],
) -> tuple[dict[int, RankProgress], int]:
    """Return the latest that the shards know of each rank."""
    rows: dict[int, RankProgress] = {}
    for shard, _ in found:
        for rank, row in shard.items():
            known = rows.get(rank, row)
            rows[rank] = max(known, row, key=lambda r: (r.exchanges, r.steps, r.incarnation))
    return rows, max((closed for _, closed in found), default=0)


def cut(plan: Plan, count: int) -> list[list[ByteRange]]:
    """Cut a center into at most `count` parts of about the same size: shards of the layout.

    Fewer, if the model is too small, or if parameters must stay whole.
    """
    shards = list(plan.layout.shards(plan.by_entry, count=_FINER * count))
    total = sum(shard.stop - shard.start for shard in shards)
    parts: list[list[ByteRange]] = [[] for _ in range(count)]
    before = 0
    for shard in shards:
        middle = before + (shard.stop - shard.start) / 2
        parts[min(int(middle * count / total), count - 1)].append(shard)
        before += shard.stop - shard.start
    return [part for part in parts if part]


def span(part: Sequence[ByteRange]) -> tuple[int, int]:
    """Return the bytes of the center that a part holds: from, to."""
    return (part[0].start, part[-1].stop) if part else (0, 0)


def of_fragment(part: Iterable[ByteRange], fragment: int) -> list[ByteRange]:
    """Return what a part holds of a fragment: one shard of the layout after another, or nothing."""
    return [range_ for range_ in part if range_.fragment == fragment]
