"""The rule at work on one part of a center."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from springline.rules.rule import Rule, is_finite

_ERRORS: Mapping[str, Any] = {"over": "raise", "invalid": "raise", "divide": "raise"}


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
        self._parts: dict[int, tuple[Part, Bytes]] = {}

    def apply(self, message: Message, c: Bytes) -> int | None:
        """Bring a message into the center.

        Args:
            message: a worker's.
            c: the center as the message is to see it: as it is, or a copy.

        Returns:
            The number of the block that was refused, if one was; it ends there.
        """
        part, room = self._of(message.sender.rank)
        blocks = (block for shard in part.bind(message.data, room) for block in shard)
        with np.errstate(**_ERRORS):
            for number, block in enumerate(blocks):
                try:
                    _merge(block, message, part.view(block.run, c))
                except RefusedError:
                    return number
        return None

    def merge_round(self, messages: Sequence[Bytes]) -> None:
        """Bring a round's messages into the center."""
        part, _ = self._of(0)
        with np.errstate(**_ERRORS):
            for run, rule, center in (block for shard in part.shards for block in shard):
                rule.merge(center, [part.view(run, data) for data in messages], 0.0)

    def _of(self, rank: int) -> tuple[Part, Bytes]:
        """Return blocks and scratch; without locks every rank has its own."""
        which = 0 if self._plan.use_locking else rank
        if which not in self._parts:
            part = Part(self._plan, self._rule, self._runs, self._center, self._state)
            self._parts[which] = part, part.room()
        return self._parts[which]


def _merge(block: Block, message: Message, c: NDArray[Any]) -> None:
    if block.rule.reads_center:
        sent = make_message(block, message.gradients, c)
    elif message.brings(block.run):
        sent = block.local.message  # a copy that optimizers may write to
        np.copyto(sent, block.local.x)
        if not is_finite(sent):
            raise RefusedError(sent)
    else:
        return  # no gradient since the last exchange: nothing to merge
    merge_message(block, sent, message.rate(block.run))
