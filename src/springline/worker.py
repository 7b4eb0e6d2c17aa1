"""A worker: its own parameters, a step counter, and an exchange every τ steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline import checks, progress, run_centers
from springline.arrays import WorkerArrays
from springline.background import Background
from springline.center.center import Center
from springline.center.first_values import OtherNames
from springline.center.layout import Bytes, Layout, aligned_zeros
from springline.center.local import Local
from springline.errors import CenterError, FinishedError, NonFiniteError, SettingsError
from springline.pace import Pace
from springline.replicas import Replicas
from springline.rules.rule import Rule
from springline.signals import deferred

Array = NDArray[Any]
MakeCenter = Callable[[Layout, Rule, Mapping[str, Array], float | None], Center]
_log = logging.getLogger("springline")


class Worker(WorkerArrays):
    """All that a front end has to wrap.

    A step of a training loop is::

        worker.begin()                       # once, before the first; after loading weights
        gradients = ...                      # of the loss at worker.parameters
        worker.observe(gradients)            # the rule sees them
        inner.step(worker.parameters, ...)   # any optimizer, in place
        worker.step()                        # counts, and exchanges when it is due

    Args:
        parameters: the model's, by name. `worker.parameters` has arrays of the same names, shapes
            and dtypes; train those, in place.
        rule: what an exchange does.
        center: a center; or the directory of a shared one, made by the first worker (the run's
            own stands for a center on a cluster, if the run is on one); or what
            makes one of a layout, a rule, values and a timeout (`Collective` does); or None for a
            center of this worker's own.
        rank: this worker's, 0 to `rule.workers` − 1.
        buffers: floating-point arrays that are not trained (BatchNorm's averages), by name.
        use_locking: whether an exchange is atomic, per part of the center; for a center that is
            made here.
        synchronous: whether to wait for all workers before the first step. By default only the
            synchronous rules do. A center that has started once never waits again.
        timeout: seconds after which waiting for others fails, naming them.
        allocate: makes a buffer of so many bytes, all zero; for memory of a special kind.
        keep_own_weights: whether a worker that has loaded weights goes on with those, though the
            center has others by then; see `begin`.
        overlap: exchange in the background, and go on meanwhile.
        other_names: what a file of the model has beside these names: another name of one of them,
            or None for what is not in the center. For a run that begins with a file (`--from`).

    Example: one worker alone, moving_rate 1, two steps by hand.

    >>> from springline.rules import ElasticAverage
    >>> rule = ElasticAverage(period=2, moving_rate=1.0)
    >>> worker = Worker({"v": np.zeros(1)}, rule)
    >>> for _ in range(2):
    ...     worker.parameters["v"] += 1
    ...     exchanged = worker.step()
    >>> exchanged, worker.parameters["v"].tolist(), worker.center.values()["v"].tolist()
    (True, [0.0], [2.0])
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        rule: Rule,
        center: Center | MakeCenter | str | Path | None = None,
        rank: int = 0,
        *,
        buffers: Mapping[str, Array] | None = None,
        use_locking: bool = True,
        synchronous: bool | None = None,
        timeout: float | None = None,
        allocate: Callable[[int], Bytes] = aligned_zeros,
        keep_own_weights: bool = False,
        overlap: bool = False,
        other_names: OtherNames | None = None,
    ) -> None:
        checks.true_or_false("use_locking", use_locking)
        checks.true_or_false("overlap", overlap)
        if overlap and rule.delay:
            raise SettingsError(
                "`delay` and `overlap` exclude each other: a delay adopts the center a fixed "
                "number of steps later, overlap when it is back. Leave one of them out."
            )
        checks.true_or_false("keep_own_weights", keep_own_weights)
        if synchronous is not None:
            checks.true_or_false("synchronous", synchronous)
        checks.seconds(timeout)
        self.rule, given = rule, center
        self.layout = Layout.of(parameters, buffers, rule.fragments, other_names)
        values = {**parameters, **(buffers or {})}
        made_here = not isinstance(center, Center)
        self.center = center = run_centers.open_center(
            center, rank, self.layout, rule, values, use_locking, timeout, other_names
        )
        super().__init__(self.layout, rule, values, allocate)
        self.local_step = 0
        self.exchanges = 0
        self.exchange_seconds = 0.0
        self.bytes_exchanged = 0  # that have gone to the center and come back
        self.distance = math.nan  # from the center at the last exchange, `‖x − c‖/‖c‖`
        self.pace = Pace(rule)
        self.finished = False
        self.for_good = True  # whether, once it has finished, it does not come back
        self.exchanged_at = [0] * self.layout.fragments  # the local step of each one's last
        self.begun = False  # whether `begin` was called, or a step made
        self.background: Background | None = None
        self.missed = False  # whether the last exchange failed, under some rules
        self._keep_own = keep_own_weights
        self._joined_with = 0  # identifies the parameters that it joined with
        try:
            self.member = center.join(rank, rule, timeout)
            self.start_step = self.member.start_step
            self.take_center()
            if self.in_rounds if synchronous is None else synchronous:
                self.member.barrier()
        except BaseException:
            if made_here:
                center.close()
            elif hasattr(self, "member"):
                self.member.leave()
            raise
        if overlap or rule.delay:
            self.background = Background(self, rule.delay)
        self._replicas = Replicas(center, rule, self.member, self.local)
        run_centers.note_center(self, given)
        progress.note_worker(self)

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.member.rank

    @property
    def in_rounds(self) -> bool:
        """Whether an exchange waits for all workers."""
        return self.center.plan.rounds

    def outer_rate(self) -> float:
        """Return the outer learning rate of the last exchange; NaN if the rule has none."""
        outer, name = self.rule.outer, next(iter(self.parameters))
        if self.rule.own_rates:
            return float(self.local.rates[self.layout.index[name]])
        if "learning_rate" not in self.rule.settings().get("outer", {}):
            return math.nan
        done = 1
        if callable(outer.learning_rate):
            done = self.member.number if self.in_rounds else self.center.version
        return outer.rate(name, max(0, done - 1))

    @property
    def fragment(self) -> int:
        """The fragment that the next exchange is of."""
        return self.member.number % self.layout.fragments

    def take_center(self) -> None:
        """`x ← c`, `c̃ ← c`, `a ← 0`: as before the first step; `c` is what the center publishes."""
        if self.background:
            self.background.drop()
        self.take(self.local)
        self.scatter()
        if not self.begun:
            self.note_start()

    def take(self, local: Local) -> None:
        """Let buffers of this worker hold the center, and nothing of its own."""
        self.member.take(local.x)
        if local.base is not None:
            np.copyto(local.base, local.x)
        local.forget_gradients()
        self.missed = False
        self.exchanged_at = [self.local_step] * self.layout.fragments
        self.plan_next()

    def note_start(self) -> None:
        """Take the parameters as they are for those that the worker has joined with."""
        self._joined_with = self.fingerprint()

    def begin(self) -> bool:
        """Agree on the first values; to be called before the first step, once weights are loaded.

        The first worker to begin gives a new center its own parameters, so that weights that were
        loaded after it joined count. All others take the center's: what they have loaded, from an
        old checkpoint of their own perhaps, would pull it back. It warns once.

        Returns:
            Whether gradients that were computed before belong to these parameters.
        """
        mark = self.fingerprint()
        changed = mark != self._joined_with
        first = self.member.seal(self.local.x, mark, changed)
        self.begun = True
        if first is None:
            if self.local.base is not None:
                np.copyto(self.local.base, self.local.x)
            return True
        elsewhere = changed or not (self.member.was_sealed or first == mark)
        if not elsewhere or (self._keep_own and changed):
            return True
        if changed and self.start_step:
            _log.warning(
                "After its restart, rank %d goes on with the center's values (version %d), not "
                "with the weights that it has loaded, which are usually older. "
                "`keep_own_weights=True` insists on them.",
                self.rank,
                self.center.version,
            )
        elif changed and first != mark:
            _log.warning(
                "The center's values (version %d) replace the weights that this worker has loaded. "
                "To begin a run with loaded weights, load them on all workers. Pass "
                "`keep_own_weights=True` to go on with this worker's own all the same.",
                self.center.version,
            )
        self.take_center()
        return False

    def step(self) -> bool:
        """Count a local step; exchange if it is due. Return whether `x` was exchanged."""
        due = self.advance()
        if self.background is None:
            if due:
                self.exchange()
            return due
        folded = self.background.step(due)
        self.background.settle()
        return folded

    def advance(self) -> bool:
        """Count a local step; return whether an exchange is due. `step` without the exchange."""
        if not self.local_step:
            self.begun = True
            progress.note_first_step(self)
        pace = self.pace
        if pace.due is None:
            pace.due = pace.plan(self.local_step, self.start_step, self.in_rounds, self.member)
        self.local_step += 1
        if self.local_step < pace.due:
            return False
        pace.due = None
        return True

    def plan_next(self) -> None:
        """Plan the next exchange anew, from the local step and the center's number."""
        self.pace.number, self.pace.due = self.member.number, None

    def exchange(self) -> None:
        """Exchange with the center now."""
        self._check_goes_on()
        before = list(self.exchanged_at)
        with deferred():
            self.gather()
            self.check_observed(self.fragment)
            self._mark_exchanged(self.local)
            try:
                if not self.exchange_with(self.local):
                    self.take(self.local)
            except BaseException as error:
                if not (isinstance(error, CenterError) or self.rule.accumulates):
                    self.exchanged_at = before  # interrupted: it is still to be made
                raise
            finally:  # also what was exchanged before a block was refused
                self.scatter()

    def exchange_with(self, local: Local) -> bool:
        """Exchange what `local` holds: the worker's own buffers or a snapshot of them.

        After an exchange that failed it is not known what of it is in the center. A rule that
        measures its messages from `base` would send that again.

        Returns:
            False if the worker is to take the center instead.
        """
        if self.missed:
            return False
        start, fragment = time.perf_counter(), self.fragment
        if not self._replicas.done:
            self._replicas.before(local)
        try:
            exchanged = self.member.exchange(local)
        except NonFiniteError:
            # With a delay nothing is adopted, though the center may have some blocks. A round that
            # we are not in is noticed there.
            self.missed = bool(self.rule.delay) and not self.in_rounds
            raise
        except BaseException:
            self.missed = self.rule.measures_from_base
            raise
        finally:
            self.distance = local.distance.take()
        if not exchanged:
            return False
        if not self._replicas.done:
            self._replicas.after(local)
        here = self.layout.fragment_bytes[fragment]
        self.bytes_exchanged += 2 * (here.stop - here.start)
        self.exchanges += 1
        now = time.perf_counter()
        self.exchange_seconds += now - start
        self.pace.resume(self.local_step)
        return True

    def hand_over(self, into: Local) -> None:
        """Copy all that an exchange needs beside `x` and `a`, and accumulate from 0 again."""
        self._check_goes_on()
        self.check_observed(self.fragment)
        self._mark_exchanged(into)
        into.gradients[:] = self.local.gradients
        into.seen[:] = self.local.seen
        into.rates[:] = self.local.rates
        self.local.forget_gradients(self.fragment)

    def finish(self) -> None:
        """Exchange what the last period left over, and leave the center."""
        if not self.finished:
            self.finished = True
            try:
                if self.background:
                    self.background.wait()
                while self.unexchanged:
                    self.exchange()
            finally:
                self.member.leave(finished=self.for_good)

    def final(self, timeout: float | None = None) -> bool:
        """Finish, wait for all other workers, and return whether this one is to report.

        Args:
            timeout: seconds after which waiting fails, naming the missing.

        Returns:
            True on one rank: the lowest that has finished. The center is then that of them all.
        """
        checks.seconds(timeout)
        self.finish()
        return progress.wait_for_all(self, timeout)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.finished = True
            self.member.leave()

    @property
    def steps_done(self) -> int:
        """How far this rank has come: what `springline.steps` has counted, else local steps."""
        counted = progress.counted()
        return self.start_step + self.local_step if counted is None else counted

    @property
    def unexchanged(self) -> int:
        """How many steps are not in the center yet, or not all of them."""
        return self.local_step - min(self.exchanged_at)

    def _check_goes_on(self) -> None:
        if self.finished and self.member.left:
            raise FinishedError(
                f"Rank {self.rank} has finished and left the center: `finish()` or `final()` was "
                "called before its last step. Call it once, after the training loop. To evaluate "
                "the center in between, use `with opt.center_weights():`."
            )

    def _mark_exchanged(self, local: Local) -> None:
        self.exchanged_at[self.fragment] = self.local_step
        local.steps = self.steps_done
        local.speed = self.pace.pause(self.local_step)
