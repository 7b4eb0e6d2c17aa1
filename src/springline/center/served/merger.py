"""The rule at work on one part of a center."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from springline.center.blocks import (
    Block,
    Part,
    RefusedError,
    State,
    make_message,
    merge_message,
)
from springline.center.layout import Bytes, Run
from springline.center.plan import Plan
from springline.center.served.messages import Message
from springline.center.served.pieces import first_block, pieces
from springline.rules.rule import CenterBlock, LocalBlock, Rule

Array = NDArray[Any]
_ERRORS: Mapping[str, Any] = {"over": "raise", "invalid": "raise", "divide": "raise"}


class _Bound(NamedTuple):
    part: Part
    blocks: list[tuple[Run, Rule, CenterBlock]]
    room: Bytes


class Merger:
    """The rule's blocks on one part of a center.

    Args:
        plan: of the whole center.
        rule: the workers'.
        runs: the shards of the layout that this part holds.
        center: its bytes.
        state: the outer optimizer's arrays.
    """

    def __init__(
        self, plan: Plan, rule: Rule, runs: Sequence[Run], center: Bytes, state: State
    ) -> None:
        self._plan = plan
        self._rule = rule
        self._runs = runs
        self._center = center
        self._state = state
        self._bound: dict[int, _Bound] = {}
        self._pieces = pieces([run for run, _, _ in self._of(0).blocks])
        self._counts: dict[
            int, tuple[int | None, Mapping[str, Array]]
        ] = {}  # by rank: of its last parameter

    @property
    def pieces(self) -> int:
        """In how many pieces a worker on the same machine sends `x`."""
        return len(self._pieces)

    def first_block(self, piece: int) -> int:
        """Return the number of a piece's first block."""
        return first_block(self._pieces, piece)

    def apply(self, message: Message, c: Bytes | None, done: int) -> int | None:
        """Bring a message into the center.

        Args:
            message: whole.
            c: the center as the message is to see it, if that is not as it is.
            done: pieces that are in the center already, or not to be touched.

        Returns:
            The number of the block that was refused, if one was; it ends there.
        """
        part, _, room = self._of(message.sender.rank)
        with np.errstate(**_ERRORS):
            blocks = [block for shard in part.bind(message.data, room) for block in shard]
            for number in range(self.first_block(done), len(blocks)):
                block = blocks[number]
                try:
                    _merge(block, message, None if c is None else part.view(block.run, c))
                except RefusedError:
                    return number
        return None

    def swap(self, piece: int, slot: Bytes, message: Message, before: bool) -> tuple[int, bool]:
        """Bring a piece of `x` into the center, and leave in its place what the worker adopts.

        Args:
            piece: its number.
            slot: where it is.
            message: whose it is.
            before: leave what `c` was before, for a worker that keeps a copy of it.

        Returns:
            How many of its blocks were applied, and whether that is all; else one was refused, and
            `c` is in its place.
        """
        which = self._pieces[piece]
        _, blocks, room = self._of(message.sender.rank)
        pairs = zip(blocks[which.blocks], which.elements(slot), strict=True)
        with np.errstate(**_ERRORS):
            for count, ((run, rule, center), flat) in enumerate(pairs):
                x = flat.reshape(center.c.shape)
                c = center.c.copy() if before and not self._plan.use_locking else center.c
                in_place = rule.in_place and not before
                local = LocalBlock(x, x if in_place else room[: x.nbytes].view(x.dtype))
                block = Block(run, rule, local, self._counted(message.sender.rank, run, center))
                adopted = c
                try:
                    if rule.reads_center:
                        sent = make_message(block, message.gradients, c)
                        if before:
                            np.copyto(x, c)
                        merge_message(block, sent, 0.0)
                        adopted = sent if rule.adopts_message else c
                    elif message.brings(run):
                        if rule.outer and rule.outer.in_place:
                            block.center = replace(block.center, work=x)
                            adopted = x
                        merge_message(block, x, message.rate(run))
                        self._count(message.sender.rank, block)
                except RefusedError:
                    np.copyto(x, c)
                    return count, False
                if not before and adopted is not x:
                    np.copyto(x, adopted)
        return len(which.runs), True

    def show(self, piece: int, slot: Bytes) -> int:
        """Leave a piece of the center in a slot; return how many blocks it has."""
        place = self._pieces[piece].place
        np.copyto(slot[: place.stop - place.start], self._center[place])
        return len(self._pieces[piece].runs)

    def merge_round(self, messages: Sequence[Bytes], piece: int) -> None:
        """Bring a piece of a round's messages into the center."""
        part, blocks, _ = self._of(0)
        with np.errstate(**_ERRORS):
            for run, rule, center in blocks[self._pieces[piece].blocks]:
                rule.merge(center, [part.view(run, data) for data in messages], 0.0)

    def _count(self, rank: int, block: Block) -> None:
        """Keep the step count of a parameter that a rank has begun with.

        It is the same for all blocks of the parameter, though other ranks come between its pieces.
        """
        if block.run.opens:
            counts = {key: a.copy() for key, a in block.center.state.items() if a.size == 1}
            self._counts[rank] = block.run.entry, counts

    def _counted(self, rank: int, run: Run, center: CenterBlock) -> CenterBlock:
        entry, counts = self._counts.get(rank, (None, {}))
        if run.opens or not counts or entry != run.entry:
            return center
        return replace(center, state={**center.state, **counts})

    def _of(self, rank: int) -> _Bound:
        """Return blocks and scratch; without locks every rank has its own."""
        which = 0 if self._plan.use_locking else rank
        if which not in self._bound:
            part = Part(self._plan, self._rule, self._runs, self._center, self._state)
            blocks = [block for shard in part.shards for block in shard]
            self._bound[which] = _Bound(part, blocks, part.room())
        return self._bound[which]


def _merge(block: Block, message: Message, c: NDArray[Any] | None) -> None:
    if block.rule.reads_center:
        sent = make_message(block, message.gradients, c)
    elif message.brings(block.run):
        sent = block.local.message  # a copy that optimizers may write to
        np.copyto(sent, block.local.x)
    else:
        return  # no gradient since the last exchange: nothing to merge
    merge_message(block, sent, message.rate(block.run))
