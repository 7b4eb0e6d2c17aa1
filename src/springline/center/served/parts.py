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
from springline.rules.rule import CenterBlock, Rule


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
        # The message itself is sent only where it is made here: else `x` is.
        self._makes = not (rule.reads_center or rule.synchronous)
        self._outgoing = plan.layout.allocate() if self._makes else local.x
        for runs, here in zip(shards, self._places, strict=True):
            a, copy = (None if b is None else b[here] for b in (local.a, local.copy))
            # `x` stands in for the center, which no message reads that is made here.
            part = Part(plan, rule, runs, local.x[here], {})
            bound = part.bind(local.x[here], part.room(), a, copy)
            blocks = [block for shard in bound for block in shard]
            if self._makes:
                for block in blocks:
                    block.local.message = part.view(block.run, self._outgoing[here])
            self._parts.append(part)
            self._blocks.append(blocks)

    def data(self, shard: int) -> Bytes:
        """Return what is sent to a shard.

        Raises:
            NonFiniteError: it is not finite.
        """
        if not self._rule.reads_center:  # else the shard makes the message, and looks
            for block in self._blocks[shard]:
                self._write(block)
        return self._outgoing[self._places[shard]]

    def adopt(self, shard: int, reply: Reply) -> NonFiniteError | None:
        """Adopt a shard's reply.

        Returns:
            The error, if a block of ours was refused there.
        """
        for number, block in enumerate(self._blocks[shard]):
            c = self._parts[shard].view(block.run, reply.data)
            if reply.forgotten:
                _take(block, c)
            elif number == reply.refused:
                return self._refused(block, c)
            else:
                self._adopt(block, c)
        return None

    def adopt_mean(self, shard: int, mean: Bytes) -> None:
        """Adopt a round's mean."""
        for block in self._blocks[shard]:
            c = self._parts[shard].view(block.run, mean)
            block.rule.adopt(block.local, block.local.x, c)

    def _write(self, block: Block) -> None:
        """Make what is sent of a block, if anything is."""
        mine, entry = block.local, block.run.entry
        if block.rule.reads_center:  # a buffer
            np.copyto(mine.message, mine.x)
        elif entry is None or self.local.seen[entry]:
            message = self._message(block)
            if self._makes and message is not mine.message:
                np.copyto(mine.message, message)

    def _message(self, block: Block) -> Any:
        try:
            return make_message(block, self.local.gradients)
        except RefusedError as error:
            raise non_finite(self._layout, block.run, error.values, self._rank) from error

    def _adopt(self, block: Block, c: Any) -> None:
        message = block.local.x
        if self._rule.adopts_message:  # `c` is the center as it was before
            message = block.rule.contribute(block.local, c, self.local.gradients)
            if not block.rule.adopts_message:  # a buffer
                after = CenterBlock(c.copy(), np.empty_like(c))
                block.rule.merge(after, (message,), 0.0)
                c = after.c
        block.rule.adopt(block.local, message, c)

    def _refused(self, block: Block, c: Any) -> NonFiniteError:
        values = block.local.x
        if block.rule.reads_center:
            with np.errstate(all="ignore"):
                values = block.rule.contribute(block.local, c, self.local.gradients)
        return non_finite(self._layout, block.run, values, self._rank)


def _take(block: Block, c: Any) -> None:
    """Go on from the center."""
    np.copyto(block.local.x, c)
    if block.local.copy is not None:
        np.copyto(block.local.copy, c)
