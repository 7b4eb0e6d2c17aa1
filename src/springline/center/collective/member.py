"""One rank's part in the rounds of a collective center."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from springline.center.center import Local, Member, check_finite
from springline.center.collective.replica import Row
from springline.center.errors import AFTER_NAN, CenterError, NonFiniteError
from springline.center.layout import Bytes, Run
from springline.rules.buffers import buffer_rule
from springline.rules.rule import LocalBlock, Rule, size

if TYPE_CHECKING:
    from springline.center.collective.center import CollectiveCenter


@dataclass(slots=True)
class Block:
    """The two sides of a block, and the rule for it."""

    run: Run
    rule: Rule
    local: LocalBlock  # its message becomes the sum over all ranks, which is the next `c`
    c: NDArray[Any]
    pulls: bool  # the worker moves by its own message; else it takes the next `c`


class CollectiveMember(Member):
    """The one worker of this process's rank.

    Model averaging adds up `x/p`, so that the sum is the mean. Elastic averaging adds up every
    rank's `δ`, and rank 0 adds `c` to its own: the sum is `c + Σδ`. Either way it is the next `c`,
    and no rank has to touch it again.
    """

    def __init__(self, center: CollectiveCenter, rule: Rule) -> None:
        self.center = center
        self.rule = rule
        self.rank = center.group.rank
        self.start_step = center.rows[self.rank].steps
        self.left = False
        self.was_sealed = bool(center.sealed)
        self._steps = self.start_step
        self._seconds = 0.0
        self._turn = threading.RLock()  # a signal handler may come in the middle of an exchange
        self._busy = False
        self._bound: Local | None = None
        self._blocks: list[list[Block]] = []

    def exchange(self, local: Local) -> None:
        """Take part in a round; two threads of a worker take turns."""
        with self._turn:
            self._check_here()
            start = time.perf_counter()
            if local is not self._bound:
                self._bind(local)
            self._seal(None)
            blocks = self._blocks[self.center.replica.next]
            self._busy = True
            try:
                large, error = self._contribute(blocks)
                steps = self._steps if error else local.steps
                self._meet(Row(error is None, False, large, self._seconds, steps))
                if error:
                    raise error
                for block in blocks:
                    if not block.pulls:
                        block.rule.adopt(block.local, block.local.message, block.local.message)
            finally:
                self._busy = False
                local.forget_gradients()
            self._steps = local.steps
            self._seconds += time.perf_counter() - start

    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Let all ranks take rank 0's values at the first step; every rank is called."""
        if self.was_sealed:
            return self.center.sealed
        return self._seal(x, mark, changed)

    def _seal(self, x: Bytes | None, mark: int = 0, changed: bool = False) -> int | None:
        """Agree on the first values with all other ranks, once.

        Args:
            x: this rank's; None for one that has not loaded any.
            mark: what tells them from others.
            changed: whether they are others than when the center was made.
        """
        center, rank = self.center, self.rank
        if not center.sealed:
            wrong = None
            if rank == 0 and changed and x is not None:
                try:
                    check_finite(center.layout, center.layout.views(x))
                except NonFiniteError as error:
                    wrong = str(error)
            said = center.group.gather(json.dumps([mark, changed, wrong]), "the first step")
            first, loaded, wrong = json.loads(said[0])
            if wrong:
                raise NonFiniteError(wrong)  # on all ranks
            if loaded:
                center.take_values(x if rank == 0 else None)
            center.sealed = first or 1
        return None if rank == 0 else center.sealed

    def barrier(self) -> None:
        """All ranks were there when the center was made."""

    def leave(self, finished: bool = False) -> None:
        """Contribute nothing any more, and return when all ranks have finished.

        Rank 0 then saves the last checkpoint. A group that has failed is left at once.
        """
        if self.left or os.getpid() != self.center.process:
            return
        with self._turn:
            if self._busy:
                raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
            self.left = True
            if not self.center.group.broken:
                self._seal(None)
            while not (self.center.group.broken or all(r.finished for r in self.center.rows)):
                self._withdraw(self._idle())
                with contextlib.suppress(NonFiniteError):  # of others, who are told
                    self._meet(Row(False, True, False, self._seconds, self._steps))
            whole = not self.center.group.broken
            self.center.group.part()
            if whole:
                self.center.save_last()
            else:
                self.center.close()

    def _meet(self, row: Row) -> None:
        """Add up, and close the round."""
        center, replica = self.center, self.center.replica
        with center.group.round():
            replica.report(self.rank, row)
            replica.add_up(center.group)
            rows = replica.reports()
            count = sum(r.contributes for r in rows)
            if self.rule.synchronous and 0 < count < len(rows):
                replica.scale(len(rows) / count)
            name = replica.overflown() if any(r.large for r in rows) else None
            counts = count > 0 or not self.rule.synchronous
            center.close_round(rows, changed=counts and name is None)
        if count and name is None:
            center.offer_save()
        if name:
            raise NonFiniteError(
                f"{name!r} would overflow the center, which stays as it was before the round, on "
                f"all ranks. {AFTER_NAN}"
            )

    def _contribute(self, blocks: list[Block]) -> tuple[bool, NonFiniteError | None]:
        """Write this rank's part of the sum; whether it is large, and what was not finite."""
        large = False
        with np.errstate(over="raise", invalid="raise"):
            for k, block in enumerate(blocks):
                try:
                    large |= self._write(block)
                except FloatingPointError:
                    # Elastic: the blocks before have moved the worker, and so they count.
                    self._withdraw(blocks if self.rule.synchronous else blocks[k:])
                    return large, self._non_finite(block)
        return large, None

    def _write(self, block: Block) -> bool:
        """Write a block's message; whether it is large."""
        rule, local = block.rule, block.local
        message = rule.contribute(local, block.c, 0)
        if rule.synchronous:
            np.divide(message, rule.workers, out=local.message)
        square = size(local.message)
        if math.isnan(square):
            raise FloatingPointError
        if block.pulls:
            rule.adopt(local, local.message, block.c)
        if self.rank == 0 and not (rule.synchronous or rule.follows):
            with np.errstate(over="ignore"):  # it is large then, and all look at the sum
                np.add(local.message, block.c, out=local.message)
        return square == math.inf

    def _withdraw(self, blocks: list[Block]) -> None:
        """Leave the sum of these blocks to the others."""
        for block in blocks:
            if self.rank == 0 and not block.rule.synchronous:
                np.copyto(block.local.message, block.c)
            else:
                block.local.message.fill(0)

    def _idle(self) -> list[Block]:
        if self._bound is None:
            self._bind(Local(self.center.layout, self.rule))
        return self._blocks[self.center.replica.next]

    def _non_finite(self, block: Block) -> NonFiniteError:
        x, run = block.local.x, block.run
        with np.errstate(all="ignore"):
            wrong = ~np.isfinite(x - block.c) if block.pulls else ~np.isfinite(x)
        first = int(np.argmax(wrong)) * x.itemsize
        return NonFiniteError(
            f"{run.kind.capitalize()} {self.center.layout.name_at(run.start + first)!r} of rank "
            f"{self.rank} has NaN or Inf (or would overflow the center), so it was not sent. "
            f"{AFTER_NAN}"
        )

    def _check_here(self) -> None:
        if self.left:
            raise CenterError(f"Rank {self.rank} has left the center, and cannot come back.")
        if self._busy:
            raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
        self.center.check_process()
        self.center.group.check()  # before elastic averaging moves the worker

    def _bind(self, local: Local) -> None:
        """Lay the worker's buffers beside the center's blocks, for either place of `c`."""
        replica = self.center.replica
        rules = {"parameter": self.rule, "buffer": buffer_rule(self.rule)}

        def bind(run: Run, following: int) -> Block:
            mine = LocalBlock(run.view(local.x), run.view(replica.buffers[following]))
            if local.copy is not None:
                mine.copy = run.view(local.copy)
            rule = rules[run.kind]
            pulls = run.kind == "parameter" and not rule.synchronous
            return Block(run, rule, mine, run.view(replica.buffers[1 - following]), pulls)

        self._blocks = [[bind(run, following) for run in replica.blocks] for following in (0, 1)]
        self._bound = local
