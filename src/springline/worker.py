"""A worker: its own parameters, a step counter, and an exchange every τ steps."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline import checks, progress, run
from springline.arrays import InPlace
from springline.center.center import Center, Local
from springline.center.layout import Bytes, Layout, aligned_zeros
from springline.center.local import LocalCenter
from springline.errors import CenterError, NonFiniteError
from springline.replicas import Replicas
from springline.rules.rule import Rule
from springline.signals import deferred

Array = NDArray[Any]
MakeCenter = Callable[[Layout, Rule, Mapping[str, Array], float | None], Center]
_log = logging.getLogger("springline")


class Worker:
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
    ) -> None:
        checks.true_or_false("use_locking", use_locking)
        checks.true_or_false("keep_own_weights", keep_own_weights)
        if synchronous is not None:
            checks.true_or_false("synchronous", synchronous)
        checks.seconds(timeout)
        self.rule, given = rule, center
        self.layout = Layout.of(parameters, buffers)
        values = {**parameters, **(buffers or {})}
        made_here = not isinstance(center, Center)
        if center is None:
            center = LocalCenter(self.layout, rule, values, use_locking=use_locking)
        elif callable(center):
            center = center(self.layout, rule, values, timeout)
        elif not isinstance(center, Center):
            center = run.create_or_join(
                center, rank, self.layout, rule, values, use_locking, timeout
            )
        else:
            center.check_layout(self.layout)
        self.center = center
        self.local = Local(self.layout, rule, allocate)
        wide = self.layout.views(self.local.x)
        narrow = {e.name: e.dtype for e in self.layout.entries if e.dtype != e.center_dtype}
        # float16 parameters train in their own dtype and are widened for an exchange.
        self._narrow = {name: (np.empty_like(values[name]), wide[name]) for name in narrow}
        arrays = {n: self._narrow[n][0] if n in self._narrow else wide[n] for n in wide}
        self.parameters = InPlace({name: arrays[name] for name in parameters})
        self.buffers = InPlace({name: arrays[name] for name in buffers or {}})
        self._a = self.layout.views(self.local.a) if self.local.a is not None else {}
        self._base = self.layout.views(self.local.base) if self.local.base is not None else {}
        self._work = np.empty(0, np.uint8)
        self.local_step = 0
        self.exchanges = 0
        self.exchange_seconds = 0.0
        self._period = rule.period
        self.finished = False
        self.for_good = True  # whether, once it has finished, it does not come back
        self.exchanged_at = 0  # the local step of the last exchange
        self.begun = False  # whether `begin` was called, or a step made
        self._missed = False  # whether the last exchange failed, under some rules
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
        self._replicas = Replicas(center, rule, self.rank)
        run.note_center(self, given)
        progress.note_worker(self)

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.member.rank

    @property
    def in_rounds(self) -> bool:
        """Whether an exchange waits for all workers."""
        return self.center.plan.rounds

    @property
    def bytes_exchanged(self) -> int:
        """Bytes that have gone to the center and come back."""
        return 2 * self.layout.nbytes * self.exchanges

    def take_center(self) -> None:
        """`x ← c`, `c̃ ← c`, `a ← 0`: as before the first step."""
        self._take_into(self.local)
        self._missed = False
        self.exchanged_at = self.local_step
        self._narrow_down()
        if not self.begun:
            self.note_start()

    def _take_into(self, local: Local) -> None:
        self.center.read(local.x)
        if local.base is not None:
            np.copyto(local.base, local.x)
        local.forget_gradients()

    def note_start(self) -> None:
        """Take the parameters as they are for those that the worker has joined with."""
        self._joined_with = self._fingerprint()

    def begin(self) -> bool:
        """Agree on the first values; to be called before the first step, once weights are loaded.

        The first worker to begin gives a new center its own parameters, so that weights that were
        loaded after it joined count. All others take the center's: what they have loaded, from an
        old checkpoint of their own perhaps, would pull it back. It warns once.

        Returns:
            Whether gradients that were computed before belong to these parameters.
        """
        mark = self._fingerprint()
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
        if changed and (self.start_step or first != mark):
            _log.warning(
                "The center's values (version %d) replace the weights that this worker has loaded. "
                "To begin a run with loaded weights, load them on all workers. Pass "
                "`keep_own_weights=True` to go on with this worker's own all the same.",
                self.center.version,
            )
        self.take_center()
        return False

    def observe(self, gradients: Mapping[str, Array]) -> None:
        """Show the rule this step's gradients, before the inner optimizer uses them.

        Elastic averaging with ρ > 0 adds `ρ(x − c̃)` to them, in place. AGN accumulates them; a
        parameter that is not among them had no gradient in this step.
        """
        if self._base or self._a:
            checks.gradients(gradients, self.parameters)
        if self._base:
            for name, g in gradients.items():
                x = self.parameters[name]
                self.rule.penalize(g, x, self._base[name], self._room_like(self._base[name]))
        if self._a:
            local, index = self.local, self.layout.index
            for name, g in gradients.items():
                entry, a = index[name], self._a[name]
                if local.seen[entry]:
                    np.add(a, g, out=a)
                else:
                    np.copyto(a, g)
                    local.seen[entry] = True
            local.gradients += 1

    def step(self) -> bool:
        """Count a local step; exchange if it is due. Return whether it was."""
        if not self.advance():
            return False
        self.exchange()
        return True

    def advance(self) -> bool:
        """Count a local step; return whether an exchange is due. `step` without the exchange."""
        if not self.local_step:
            self.begun = True
            progress.note_first_step(self)
        self.local_step += 1
        return self.local_step % self._period == 0

    def exchange(self) -> None:
        """Exchange with the center now."""
        self._check_observed()
        before = self.exchanged_at
        with deferred():
            self._mark_exchanged(self.local)
            try:
                self.exchange_with(self.local)
            except BaseException as error:
                if not (isinstance(error, CenterError) or self.rule.accumulates):
                    self.exchanged_at = before  # interrupted: it is still to be made
                raise
            finally:  # also what was exchanged before a block was refused
                self._narrow_down()

    def exchange_with(self, local: Local) -> None:
        """Exchange what `local` holds: the worker's own buffers or a snapshot of them.

        After an exchange that failed nobody knows what of it is in the center. A rule that measures
        its messages from `base` would send that again, so the next exchange only takes the center.
        """
        if self._missed:
            self._missed = False
            self._take_into(local)
            return
        start = time.perf_counter()
        before = None if self._replicas.done else self._replicas.look(local.x)
        try:
            self.member.exchange(local)
        except NonFiniteError:
            raise
        except BaseException:
            self._missed = self.rule.measures_from_base
            raise
        if before is not None:
            self._replicas.compare(before, self._replicas.look(local.x))
        self.exchanges += 1
        self.exchange_seconds += time.perf_counter() - start

    def hand_over(self, into: Local) -> None:
        """Copy all that an exchange needs beside `x` and `a`, and accumulate from 0 again."""
        self._mark_exchanged(into)
        into.gradients = self.local.gradients
        into.seen[:] = self.local.seen
        into.rates[:] = self.local.rates
        self.local.forget_gradients()

    def set_learning_rate(self, rate: float | Mapping[str, float]) -> None:
        """Set the rate that travels with AGN's messages: one for all, or one per parameter."""
        rates = rate if isinstance(rate, Mapping) else dict.fromkeys(self.parameters, rate)
        for name, value in rates.items():
            checks.parameter(name, self.parameters)
            if not (checks.is_number(value) and 0 <= value < math.inf):
                raise ValueError(
                    f"A learning rate must be a finite number >= 0. Received: {value!r} "
                    f"for {name!r}."
                )
            self.local.rates[self.layout.index[name]] = value

    def finish(self) -> None:
        """Exchange what the last period left over, and leave the center."""
        if not self.finished:
            self.finished = True
            try:
                if self.local_step > self.exchanged_at:
                    self.exchange()
            finally:
                self.member.leave(finished=self.for_good)

    def final(self, timeout: float | None = None) -> bool:
        """Finish, wait for all other workers, and return whether this one is to report.

        Args:
            timeout: seconds after which waiting fails, naming who is missing.

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
        """How many steps are not in the center yet."""
        return self.local_step - self.exchanged_at

    def _mark_exchanged(self, local: Local) -> None:
        self.exchanged_at = self.local_step
        local.steps = self.steps_done
        self._widen()

    def _widen(self) -> None:
        for narrow, wide in self._narrow.values():
            np.copyto(wide, narrow)

    def _fingerprint(self) -> int:
        """Return a number that identifies the parameters; more than 1."""
        self._widen()
        found = 0
        for entry in self.layout.entries:
            if entry.kind == "parameter":
                found = zlib.crc32(entry.view(self.local.x).data, found)
        return found + 2

    def _check_observed(self) -> None:
        if self.rule.accumulates and not self.local.gradients:
            raise RuntimeError(
                f"The rule {self.rule.name!r} sends gradients, but `observe` was not called since "
                "the last exchange. Call `worker.observe(gradients)` in every step."
            )

    def _narrow_down(self) -> None:
        for narrow, wide in self._narrow.values():
            np.copyto(narrow, wide, casting="same_kind")

    def _room_like(self, array: Array) -> Array:
        if self._work.nbytes < array.nbytes:
            self._work = np.empty(array.nbytes, np.uint8)
        return self._work[: array.nbytes].view(array.dtype).reshape(array.shape)
