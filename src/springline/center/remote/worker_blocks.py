"""A fragment of a worker's buffers, cut like the shards of a remote center."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from springline.center.blocks import Blocks
from springline.center.layout import ByteRange, Bytes, aligned_zeros
from springline.center.local import Local
from springline.center.plan import Plan
from springline.center.remote.messages import Reply, of_fragment, span
from springline.center.verbs import (
    Array,
    Block,
    RefusedError,
    Side,
    adopt,
    contribute,
    non_finite,
    take,
)
from springline.errors import CenterError, NonFiniteError
from springline.rules.rule import Rule

_log = logging.getLogger("springline")


class WorkerBlocks:
    """The blocks of each shard in a fragment of a worker's buffers: what is sent and adopted."""

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[list[ByteRange]],
        fragment: int,
        rule: Rule,
        rank: int,
        local: Local,
    ) -> None:
        self.local = local
        self.fragment = fragment
        self._layout = plan.layout
        self._rule = rule
        self._rank = rank
        parts = [of_fragment(ranges, fragment) for ranges in shards]
        self._places = [slice(*span(ranges)) for ranges in parts]
        self._outgoing = [aligned_zeros(here.stop - here.start) for here in self._places]
        self._blocks: list[Blocks] = []
        self._sides: list[list[tuple[Block, Side]]] = []
        for ranges, here, out in zip(parts, self._places, self._outgoing, strict=True):
            a, base = (None if b is None else b[here] for b in (local.a, local.base))
            # `x` stands in for the center, which is not here.
            blocks = Blocks(plan, rule, ranges, local.x[here], {})
            bound = blocks.bind(local.x[here], a, base, out, local.distance)
            pairs = zip(blocks.shards, bound, strict=True)
            self._blocks.append(blocks)
            self._sides.append([pair for shard in pairs for pair in zip(*shard, strict=True)])

    def data(self, shard: int) -> Bytes:
        """Return what is sent to a shard.

        Raises:
            NonFiniteError: it is not finite.
        """
        here, sides = self._places[shard], self._sides[shard]
        messages = [self._message(block, side) for block, side in sides]
        if all(m is side.x for m, (_, side) in zip(messages, sides, strict=True)):
            return self.local.x[here]
        for m, (_, side) in zip(messages, sides, strict=True):
            if m is not side.out:
                np.copyto(side.out, m)
        return self._outgoing[shard]

    def adopt(self, replies: Sequence[Callable[[], Reply]]) -> NonFiniteError | None:
        """Adopt what each shard replies, also if another shard fails.

        Returns:
            The error, if a block of ours was refused.
        """
        refused: NonFiniteError | None = None
        failed: CenterError | None = None
        for shard, reply in enumerate(replies):
            try:
                refused = self._adopt(shard, reply()) or refused
            except CenterError as error:
                failed = failed or error
        if failed:
            raise failed
        return refused

    def _adopt(self, shard: int, reply: Reply) -> NonFiniteError | None:
        if reply.forgotten and self._rule.adopts_seen:  # for the others it is the usual reply
            _log.warning(
                "Shard %d of the center had applied this exchange already, but its answer was "
                "lost: going on from the center.",
                shard,
            )
        refused = None
        for block, side in self._sides[shard]:
            c = self._blocks[shard].view(block.range, reply.data)
            bad = next(
                (at for at in reply.refused if block.range.start <= at < block.range.stop), None
            )
            if bad is not None:
                refused = non_finite(self._layout, bad, self._rank)
            elif reply.forgotten and block.rule.adopts_seen:
                take(side, c)
            else:
                adopt(block, side, c)
        return refused

    def _message(self, block: Block, side: Side) -> Array:
        """Return a block's message; of one without a gradient, scratch that is not read."""
        if not block.has_gradient(self.local.seen):
            return side.out
        try:
            return contribute(block, side, int(self.local.gradients[self.fragment]))
        except RefusedError as error:
            raise non_finite(self._layout, error.offset, self._rank) from error
