"""What all our callbacks have in common: a worker that has joined its center while `fit` runs."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import keras  # type: ignore[import-untyped]

from springline import progress
from springline.center import Center, SharedCenter
from springline.center.extras import write_extras
from springline.center.remote.center import RemoteCenter
from springline.checks import seconds, true_or_false
from springline.files import can_do_without
from springline.keras.observed import Observed, observed_of
from springline.keras.refused import check_first_epoch, check_model
from springline.keras.weights import Weights, arrays
from springline.rules.rule import Rule
from springline.run import Run
from springline.worker import Worker

_LOOK = 0.1  # seconds between two looks at RUN/stop
_LOG = 1.0  # seconds between two lines of the metrics, where no exchange is
_log = logging.getLogger("springline")
MakeRule = Callable[[int], Rule]
AnyCenter = Center | str | Path | None


class Options(TypedDict, total=False):
    """What all callbacks take, whatever their rule.

    Attributes:
        use_locking: whether an exchange is atomic, per part of the center. False only without
            outer state: not with momentum or Adam.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker goes on with weights that another callback has loaded
            when `fit` begins, where the center has others by then.
    """

    use_locking: bool
    center: AnyCenter
    timeout: float | None
    keep_own_weights: bool


class CenterCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback whose worker exchanges with a center. Use one of its subclasses.

    1. When `fit` begins, the worker joins the center, and the model takes its values.
    2. After every step it counts, and every τ steps it exchanges.
    3. From an epoch's end to the next step the model holds the center: `fit`'s validation, and
       callbacks such as ModelCheckpoint and EarlyStopping at the end of the epoch, see that.
    4. When `fit` ends, it exchanges what is left, waits for the other workers, and the model holds
       the center of them all.

    Attributes:
        optimizer: what the model is to be compiled with, under rules that need gradients.
        worker: the worker of the last `fit`; None before the first.
        final: after `fit`, whether this worker is the one that reports and writes files.
    """

    optimizer: Observed | None = None
    worker: Worker | None = None
    final = False
    _warned = False  # that an epoch is shorter than the period

    def __init__(
        self,
        make_rule: MakeRule,
        of_rule: dict[str, bool],
        *,
        use_locking: bool = True,
        center: AnyCenter = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
    ) -> None:
        super().__init__()
        seconds(timeout)
        options = {"use_locking": use_locking, "keep_own_weights": keep_own_weights} | of_rule
        for name, value in options.items():
            true_or_false(name, value)
        self._run = Run.from_environment()
        if center is None:
            self._run.check_meeting("pass `center=`")
            center = self._run.center_directory
        self._center = center
        given = center.settings["workers"] if isinstance(center, Center) else None
        self._rule = make_rule(self._run.workers if given is None else given)
        self._timeout = timeout
        self._options: Any = options

    # The beginning.

    def on_train_begin(self, logs: Any = None) -> None:
        """Join the center."""
        check_model(self._model, self.model, self._rule)
        self._observed = observed_of(self.model, self.optimizer)
        self._leave()
        self._weights = Weights(self.model)
        self._length: int | None = self.params.get("steps")  # of an epoch
        total = (self._length or 0) * self.params["epochs"]
        claim = progress.Claim(total)
        self._first, self._before = claim.first, claim.made(0, total)
        if self._length is None:
            self._before = max(0, progress.start_step() - self._first)
        self._made = self._before  # steps of this `fit`, with those before a restart
        self._batch = -1  # the last of this epoch
        self._holds_center, self._begun = False, False
        self._look_at = self._log_at = 0.0
        self.final = False
        self._join()
        self._skip()

    def _skip(self) -> None:
        """Begin with the epoch in which the rank was when it was restarted."""
        self._skips = self._before >= (self._length or 1)
        if self._skips and self._length:
            self.model._initial_epoch = self._before // self._length
        elif self._skips:
            _log.warning(
                "Rank %d had made %d steps before it was restarted, and begins with the first "
                "epoch again: `fit` does not know how many batches there are. Give it "
                "`steps_per_epoch`, or data that has a length.",
                self._run.rank,
                self._before,
            )

    def _join(self) -> None:
        self.worker = worker = Worker(
            arrays(self._weights.trained),
            self._rule,
            self._center,
            self._run.rank,
            buffers=arrays(self._weights.statistics),
            other_names=dict.fromkeys(self._weights.others),
            timeout=self._timeout,
            **self._options,
        )
        worker.bind(self._gather, self._scatter)
        worker.scatter()
        worker.note_start()  # again: half precision rounds
        self._write_extras(worker)
        if isinstance(worker.center, SharedCenter) and "TORCHELASTIC_RUN_ID" in os.environ:
            atexit.register(worker.center.retire_at_exit, worker.rank)  # nobody else does

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Agree on the first values, once other callbacks have loaded theirs."""
        if not self._begun:
            if self._run.directory and not self._before:
                check_first_epoch(epoch)
            self._begin()
        self._batch = -1

    def _begin(self) -> None:
        self._begun = True
        self._joined().begin()

    # A step.

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Take the center out of the model again, if it holds it."""
        if self._holds_center:
            self._holds_center = False
            self._scatter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count; exchange if it is due."""
        worker = self._joined()
        last = batch if self._length is None else min(batch, self._length - 1)
        steps, self._batch = last - self._batch, last
        self._made += steps
        progress.note_steps(self._first + self._made)
        due = sum(worker.advance() for _ in range(steps)) > 0
        if worker.background:
            worker.background.step(due)
        elif due:
            worker.exchange()
        now = time.monotonic()
        if due or now >= self._log_at:
            self._log_at = now + _LOG
            progress.log_numbers(logs or {})
        if now >= self._look_at:
            self._look_at = now + _LOOK
            if self._run.stopping():
                self.model.stop_training = True
        if self._made >= self._total():
            self.model.stop_training = True

    def _total(self) -> float:
        """Return how many steps this `fit` makes, if that is known yet."""
        if self._length is None:
            return float("inf")
        return self._length * float(self.params["epochs"])

    # Between two epochs.

    def on_test_begin(self, logs: Any = None) -> None:
        """Let `fit`'s validation see the center."""
        self._show_center()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let the callbacks that follow see the center, and log."""
        if self._length is None and not self.model.stop_training:
            self._length = self._batch + 1
            progress.Claim(self._length * self.params["epochs"])
            self.model.stop_training = self._made >= self._total()
        self._show_center()
        progress.log_numbers(logs or {})

    def _show_center(self) -> None:
        worker = self.worker
        if worker is None or worker.finished or self._holds_center or not self._begun:
            return
        if worker.background and worker.rule.delay:
            worker.background.settle()
        elif worker.background:
            worker.background.wait()
        if self._center is None and worker.rule.follows and not worker.rule.keeps_base:
            while worker.unexchanged:  # alone: the center is what the model has
                worker.exchange()
            return
        if not (worker.exchanges or worker.start_step or self._warned):
            self._warned = True
            _log.warning(
                "Rank %d has made %d steps and not exchanged yet: at the end of this epoch the "
                "model holds a center without them. Epochs should be longer than `period`.",
                worker.rank,
                worker.local_step,
            )
        worker.gather()
        self._holds_center = True
        self._weights.write(worker.center.values())

    # The end.

    def on_train_end(self, logs: Any = None) -> None:
        """Exchange what is left, wait for the others, and put the center into the model."""
        worker = self._joined()
        if not self._begun:
            self._begin()  # all its steps were made before a restart
        if not self._holds_center:
            worker.gather()
            self._holds_center = True  # what is exchanged is the worker's own from here on
        worker.finish()
        self._write_extras(worker)
        # Others go on if this one has stopped early.
        steps = self._first + (self._total() if self._length else self._made)
        self.final = progress.wait_for_all(worker, self._timeout, steps)
        self._weights.write(worker.center.values())
        if self._observed:
            self._observed.rest()
        if self._skips:
            self.model._initial_epoch = None

    def _leave(self) -> None:
        """Leave the center, if the last `fit` has ended with an error."""
        if self.worker is not None and not self.worker.finished:
            self.worker.finished = True
            self.worker.member.leave()

    # Between the model and the worker.

    def _joined(self) -> Worker:
        if self.worker is None:
            raise RuntimeError("There is no worker yet: `fit` makes it when it begins.")
        return self.worker

    def _gather(self) -> None:
        if not self._holds_center:
            self._sync()
            worker = self._joined()
            self._weights.read(worker.parameters, worker.buffers)
            if self._observed:
                self._observed.read(worker, self._weights.trained)

    def _scatter(self) -> None:
        if not self._holds_center:
            self._sync()
            worker = self._joined()
            self._weights.write({**worker.parameters, **worker.buffers})
            if self._observed:
                self._observed.write(worker, self._weights.trained)

    def _sync(self) -> None:
        """Let the variables hold what JAX's trainer has; it takes them again at its next step."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()

    @can_do_without("What the model's file has beside the center")
    def _write_extras(self, worker: Worker) -> None:
        """Let rank 0 write down what belongs to the model's file beside the center."""
        center = worker.center
        folder = center.directory if isinstance(center, SharedCenter) else None
        if isinstance(center, RemoteCenter):  # elsewhere: our launcher looks here
            folder = self._run.center_directory
        if folder is not None and worker.rank == 0:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_extras(folder, arrays(self._weights.others), {})
