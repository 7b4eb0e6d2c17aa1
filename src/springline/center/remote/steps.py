"""The center's side of the four verbs: one fragment on one part of a remote center."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from springline.center.blocks import Blocks, State
from springline.center.layout import ByteRange, Bytes, aligned_zeros
from springline.center.plan import Plan
from springline.center.remote.messages import Message, Reply
from springline.center.verbs import (
    ERRORS,
    RefusedError,
    adopted,
    check_message,
    commit,
    mean_rates,
    step,
)
from springline.rules.outer import Exchange
from springline.rules.rule import Rule


class Steps:
    """The blocks of one fragment in one part of a center."""

    def __init__(
        self, plan: Plan, rule: Rule, ranges: Sequence[ByteRange], center: Bytes, state: State
    ) -> None:
        self._nbytes = len(center)
        self._parts = Blocks(plan, rule, ranges, center, state)
        self._blocks = [block for shard in self._parts.shards for block in shard]

    def exchange(self, message: Message, exchange: Exchange) -> Reply:
        """Take a step with a message; return what the worker adopts."""
        reply, refused = aligned_zeros(self._nbytes), []
        with np.errstate(**ERRORS):
            for block in self._blocks:
                out = self._parts.view(block.range, reply)
                stepped = block.has_gradient(message.seen)
                try:
                    if stepped:
                        np.copyto(out, self._parts.view(block.range, message.data))
                        check_message(block, out)
                        step(block, (out,), exchange, message.rates)
                except RefusedError as error:
                    refused.append(error.offset)
                    stepped = False
                np.copyto(out, adopted(block, stepped, out))
                if stepped:
                    commit(block)
        return Reply(reply, tuple(refused))

    def round(self, messages: Sequence[Message], number: int) -> tuple[int, ...]:
        """Take a step with the mean of a round's messages; return what was refused, as in Reply."""
        exchange = Exchange(number=number)
        rates = mean_rates([message.rates for message in messages])
        data = [message.data for message in messages]
        refused = []
        with np.errstate(**ERRORS):
            for block in self._blocks:
                try:
                    parts = [self._parts.view(block.range, part) for part in data]
                    step(block, parts, exchange, rates)
                except RefusedError as error:
                    refused.append(error.offset)
                else:
                    commit(block)
        return tuple(refused)

    def published(self) -> Bytes:
        """Return a copy of what workers are given for the center."""
        data = aligned_zeros(self._nbytes)
        for k in range(len(self._parts.shards)):
            self._parts.publish(k, data)
        return data
