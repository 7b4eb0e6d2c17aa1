"""A worker's buffers, laid out as the parts of a served center: what is sent, what is adopted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from springline.center.blocks import Block, Part, RefusedError, make_message, non_finite
from springline.center.center import Local
from springline.center.errors import NonFiniteError
from springline.center.layout import Bytes, Run
from springline.center.plan import Plan
from springline.center.served.messages import Reply, span
from springline.center.served.near import AGAIN, REFUSED
from springline.center.served.pieces import Piece, first_block, pieces
from springline.rules.rule import CenterBlock, Rule

_ALL = slice(None)


class Parts:
    """The blocks of each shard in a worker's buffers.

    Args:
        plan: the center's.
        shards: what each shard holds of it.
        rule: the worker's.
        rank: the worker's.
        local: its buffers.
    """

    def __init__(
        self, plan: Plan, shards: Sequence[list[Run]], rule: Rule, rank: int, local: Local
    ) -> None:
        self.local = local
        self._layout = plan.layout
        self._rule = rule
        self._rank = rank
        self._places = [slice(*span(runs)) for runs in shards]
        self._parts: list[Part] = []
        self._blocks: list[list[Block]] = []
        for runs, here in zip(shards, self._places, strict=True):
            a, copy = (None if b is None else b[here] for b in (local.a, local.copy))
            # `x` stands in for the center, which no message reads that is made here.
            part = Part(plan, rule, runs, local.x[here], {})
            bound = part.bind(local.x[here], part.room(), a, copy)
            self._parts.append(part)
            self._blocks.append([block for shard in bound for block in shard])
        self.pieces = [pieces([block.run for block in blocks]) for blocks in self._blocks]
        self.sizes = [here.stop - here.start for here in self._places]
        self._outgoing: Bytes | None = None  # for messages that are not `x` itself

    def data(self, shard: int) -> Bytes:
        """Return what is sent to a shard as one message: `x` itself where the shard makes it.

        Raises:
            NonFiniteError: it is not finite.
        """
        here, blocks = self._places[shard], self._blocks[shard]
        if self._rule.reads_center:
            return self.local.x[here]
        if self._rule.synchronous:
            for block in blocks:
                self._message(block)
            return self.local.x[here]
        if self._outgoing is None:
            self._outgoing = self._layout.allocate()
        for block in blocks:
            self._write(block, self._parts[shard].view(block.run, self._outgoing[here]))
        return self._outgoing[here]

    def write_x(self, shard: int, out: Bytes, pieces: slice) -> None:
        """Write some pieces of what a worker contributes to a round, `x` itself, to a shard's room.

        Raises:
            NonFiniteError: it is not finite.
        """
        x = self.local.x[self._places[shard]]
        for piece in self.pieces[shard][pieces]:
            for block in self._blocks[shard][piece.blocks]:
                self._message(block)
            np.copyto(out[piece.place], x[piece.place])

    def fill(self, shard: int, piece: Piece, slot: Bytes) -> None:
        """Write a piece of what is sent into a slot.

        Raises:
            NonFiniteError: it is not finite.
        """
        for block, out in zip(self._blocks[shard][piece.blocks], piece.elements(slot), strict=True):
            self._write(block, out.reshape(block.local.x.shape))

    def adopt(self, shard: int, reply: Reply, had: int) -> NonFiniteError | None:
        """Adopt a shard's reply, but for the pieces that were adopted before.

        Returns:
            The error, if a block of ours was refused there.
        """
        blocks = self._blocks[shard]
        first, known = (first_block(self.pieces[shard], n) for n in (had, reply.known))
        for number in range(first, len(blocks)):
            block = blocks[number]
            c = self._parts[shard].view(block.run, reply.data)
            if reply.forgotten or number < known:
                _take(block, c)
            elif number == reply.refused:
                return self._refused(block, c)
            else:
                self._adopt(block, c)
        return None

    def adopt_piece(
        self, shard: int, piece: Piece, slot: Bytes, answer: int
    ) -> NonFiniteError | None:
        """Adopt a piece of a shard's reply.

        Returns:
            The same.
        """
        blocks = self._blocks[shard][piece.blocks]
        pairs = [
            (block, c.reshape(block.local.x.shape))
            for block, c in zip(blocks, piece.elements(slot), strict=True)
        ]
        if answer == REFUSED:
            bad = [pair for pair in pairs if not np.isfinite(self._where(*pair)).all()]
            return self._refused(*(bad or pairs)[0])
        for number, (block, c) in enumerate(pairs):
            if answer == AGAIN:
                _take(block, c)
            elif number == answer:
                return self._refused(block, c)
            elif self._rule.keeps_copy:
                self._adopt(block, c)
            else:
                block.rule.adopt(block.local, c, c)  # what it adopts: its message, or the center
        return None

    def adopt_mean(self, shard: int, mean: Bytes, pieces: slice = _ALL) -> None:
        """Adopt a round's mean, or some pieces of it."""
        some = self.pieces[shard][pieces]
        for block in (block for piece in some for block in self._blocks[shard][piece.blocks]):
            c = self._parts[shard].view(block.run, mean)
            block.rule.adopt(block.local, block.local.x, c)

    def _adopt(self, block: Block, c: Any) -> None:
        message = block.local.x
        if self._rule.adopts_message:  # `c` is the center as it was before
            message = block.rule.contribute(block.local, c, self.local.gradients)
            if not block.rule.adopts_message:
                after = CenterBlock(c.copy(), np.empty_like(c))
                block.rule.merge(after, (message,), 0.0)
                c = after.c
        block.rule.adopt(block.local, message, c)

    def _write(self, block: Block, out: Any) -> None:
        """Write what is sent of a block, if anything is."""
        mine = block.local
        if block.rule.reads_center:
            np.copyto(out, mine.x)
        elif self._has_gradient(block):
            room, mine.message = mine.message, out
            try:
                message = self._message(block)
            finally:
                mine.message = room
            if message is not out:
                np.copyto(out, message)

    def _has_gradient(self, block: Block) -> bool:
        entry = block.run.entry
        return entry is None or bool(self.local.seen[entry])

    def _message(self, block: Block) -> Any:
        try:
            return make_message(block, self.local.gradients)
        except RefusedError as error:
            raise non_finite(self._layout, block.run, error.values, self._rank) from error

    def _refused(self, block: Block, c: Any) -> NonFiniteError:
        return non_finite(self._layout, block.run, self._where(block, c), self._rank)

    def _where(self, block: Block, c: Any) -> Any:
        """Return what was not finite in a block that a shard refused."""
        if block.rule.reads_center:
            with np.errstate(all="ignore"):
                return block.rule.contribute(block.local, c, self.local.gradients)
        return block.local.x


def _take(block: Block, c: Any) -> None:
    """Go on from the center."""
    np.copyto(block.local.x, c)
    if block.local.copy is not None:
        np.copyto(block.local.copy, c)
