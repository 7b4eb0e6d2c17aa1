"""One rank's part in the rounds of a collective center."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from springline.center.blocks import Blocks
from springline.center.center import Member, check_finite
from springline.center.collective.replica import RankReport
from springline.center.layout import Bytes
from springline.center.local import Local
from springline.center.state import arrays_of
from springline.center.verbs import (
    ERRORS,
    Block,
    RefusedError,
    Side,
    adopt,
    adopted,
    commit,
    contribute,
    non_finite,
    step,
)
from springline.errors import AFTER_NAN, CenterError, NonFiniteError
from springline.rules.outer import Exchange
from springline.rules.rule import Rule, size

if TYPE_CHECKING:
    from springline.center.collective.center import CollectiveCenter


CHECK_EVERY = 100  # rounds from one comparison of the ranks' centers to the next


class CollectiveMember(Member):
    """The one worker of this process's rank.

    Every rank adds its message, divided by the number of ranks, to the sum. Each then takes the
    same step on its own `c`.
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
        plan, replica = center.plan, center.replica
        state = arrays_of(plan.state, replica.state)
        self._blocks = Blocks(plan, rule, plan.shards, replica.center, state)
        self._sides: list[list[tuple[Block, Side]]] = []  # per fragment
        self._missed = False  # whether what it sends is not measured from the center any more
        self._not_adopted: str | None = None  # a parameter whose difference to `c` overflows

    @property
    def number(self) -> int:
        """The number of the next round."""
        return self.center.version

    @property
    def _fragment(self) -> int:
        return self.number % self.center.layout.fragments

    def exchange(self, local: Local) -> bool:
        """Take part in a round; two threads of a worker take turns.

        A rank that had NaN has no part in the round after it either: it takes the center then.
        """
        with self._turn:
            self._check_here()
            start = time.perf_counter()
            if local is not self._bound:
                self._bind(local)
            self._seal(None)
            self._busy = True
            fragment = self._fragment
            try:
                if self._missed:
                    self._idle_in_a_round(finished=False)
                    return False
                may_overflow, error = self._contribute(local)
                steps = self._steps if error else local.steps
                self._meet(RankReport(error is None, False, may_overflow, self._seconds, steps))
                if error:
                    raise error
            except NonFiniteError:
                self._missed = self.rule.measures_from_base
                raise
            finally:
                self._busy = False
                local.forget_gradients(fragment)
            self._steps = local.steps
            self._seconds += time.perf_counter() - start
            return True

    def take(self, out: Bytes) -> None:
        """Copy what a worker goes on from, all of one round."""
        self.center.check_process()
        self._missed = False
        with self.center.turn:
            for k in range(len(self._blocks.shards)):
                self._blocks.publish(k, out)

    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Let all ranks take rank 0's values at the first step; every rank is called."""
        if self.was_sealed:
            return self.center.sealed
        return self._seal(x, mark, changed)

    def _seal(self, x: Bytes | None, mark: int = 0, changed: bool = False) -> int | None:
        """Agree on the first values with all other ranks, once.

        Args:
            x: this rank's; None for one that has not loaded any.
            mark: identifies them.
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
            texts = center.group.gather(json.dumps([mark, changed, wrong]), "the first step")
            first, loaded, wrong = json.loads(texts[0])
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
                self._idle_in_a_round(finished=True)
            whole = not self.center.group.broken
            self.center.group.part()
            if whole:
                self.center.save_last()
            else:
                self.center.close()

    def _idle_in_a_round(self, finished: bool) -> None:
        """Make the others' round with them, and contribute nothing."""
        self.center.replica.messages.fill(0)
        self.center.replica.rates.fill(0)
        with contextlib.suppress(NonFiniteError):  # of others, which raise it
            self._meet(RankReport(False, finished, False, self._seconds, self._steps))

    def _meet(self, row: RankReport) -> None:
        """Add up, and close the round: a step on every rank's own `c`."""
        center, replica = self.center, self.center.replica
        if center.version and center.version % CHECK_EVERY == 0:
            row = replace(row, checksum=replica.checksum())
        fragment = self._fragment
        with center.group.round():
            replica.report(self.rank, row)
            replica.add_up(center.group, fragment)
            rows = replica.reports()
            self._compare(rows)
            count = sum(r.contributes for r in rows)
            if 0 < count < len(rows):
                replica.scale(len(rows) / count, fragment)
            name = replica.overflown(fragment) if any(r.may_overflow for r in rows) else None
            with center.turn:
                if count and name is None:
                    name = self._step(count, adopts=row.contributes)
                    counts = True
                else:
                    counts = False
                center.close_round(rows, changed=counts)
        if counts:
            center.offer_save()
        mine, self._not_adopted = self._not_adopted, None
        if mine:
            raise NonFiniteError(
                f"Rank {self.rank} is too far from the center to adopt {mine!r}. {AFTER_NAN}"
            )
        if name:
            raise NonFiniteError(
                f"{name!r} would overflow the center, where it stays as it was before the "
                f"round, on all ranks. {AFTER_NAN}"
            )

    def _step(self, count: int, adopts: bool) -> str | None:
        """Step every block, and adopt it; return the name of one that would overflow."""
        exchange = Exchange(number=self.number)
        rates = self.center.replica.rates / count
        overflown = None
        with np.errstate(**ERRORS):
            for block, side in (self._sides or self._idle())[self._fragment]:
                try:
                    step(block, (side.out,), exchange, rates, count=count)
                except RefusedError as error:
                    overflown = overflown or self.center.layout.entry_at(error.offset).name
                    continue
                if adopts:
                    c = adopted(block, True, side.out)
                    try:
                        adopt(block, side, c)
                    except FloatingPointError:  # of this rank alone: the others go on
                        name = self.center.layout.entry_at(block.range.start).name
                        self._not_adopted = block.name or name
                commit(block)
        return overflown

    def _compare(self, rows: list[RankReport]) -> None:
        """Raise if a rank's center differs from the first one's."""
        wrong = [rank for rank, row in enumerate(rows) if row.checksum != rows[0].checksum]
        if wrong:
            raise CenterError(
                f"The centers of ranks {wrong} differ from rank 0's, though every rank made the "
                "same steps. Do all machines have the same software and hardware? Start again from "
                "the last checkpoint."
            )

    def _contribute(self, local: Local) -> tuple[bool, NonFiniteError | None]:
        """Write this rank's part of the sum; whether it may overflow, and what was not finite."""
        may_overflow = False
        replica, fragment = self.center.replica, self._fragment
        np.copyto(replica.rates, local.rates)
        with np.errstate(**ERRORS):
            for block, side in self._sides[fragment]:
                try:
                    message = contribute(block, side, int(local.gradients[fragment]))
                except RefusedError as error:
                    replica.messages.fill(0)
                    replica.rates.fill(0)
                    return False, non_finite(self.center.layout, error.offset, self.rank)
                np.divide(message, self.rule.workers, out=side.out)
                may_overflow |= size(side.out) == math.inf
        return may_overflow, None

    def _idle(self) -> list[list[tuple[Block, Side]]]:
        """Return sides for a rank that never exchanged, and only makes the others' steps."""
        self._bind(Local(self.center.layout, self.rule))
        return self._sides

    def _check_here(self) -> None:
        if self.left:
            raise CenterError(f"Rank {self.rank} has left the center, and cannot come back.")
        if self._busy:
            raise CenterError(f"Rank {self.rank} is in the middle of an exchange.")
        self.center.check_process()
        self.center.group.check()  # before elastic averaging moves the worker

    def _bind(self, local: Local) -> None:
        """Lay the worker's buffers beside the center's blocks."""
        out = self.center.replica.messages
        bound = self._blocks.bind(local.x, local.a, local.base, out, local.distance)
        self._sides = [
            [pair for k in shards for pair in zip(self._blocks.shards[k], bound[k], strict=True)]
            for shards in self.center.plan.fragments
        ]
        self._bound = local
