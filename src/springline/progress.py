"""How far this process's worker has come: what a script counts, logs and reports."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from springline import checks
from springline.center.waiting import wait_until
from springline.errors import CenterError
from springline.files import can_do_without, write_text
from springline.run import REPORT, Run, ToLauncher, directory

if TYPE_CHECKING:
    from springline.worker import Worker

_STOP_LOOK = 0.1  # seconds between two looks at RUN/stop
_END_LOOK = 0.05  # seconds between two looks at which ranks have finished
_UNSEEN = 10.0  # seconds to wait for a rank that no launcher restarts
# What a line of the metrics holds of the last exchange.
BYTES, DISTANCE, OUTER_RATE = "bytes_exchanged", "distance", "outer_learning_rate"
_log = logging.getLogger("springline")


@dataclass
class _Count:
    """What this process knows of its worker."""

    worker: Callable[[], Any] = lambda: None  # the last that was made
    start: int | None = None  # steps that its rank had made before this process
    asked: bool = False  # whether the script has asked for that
    claimed: int = 0  # steps that calls of `steps` own
    done: int | None = None  # steps of the rank, if `steps` counts them
    looping: bool = False  # whether the script is in the middle of a loop over them
    loaded: bool = False  # whether it has loaded a checkpoint, and was not warned of what follows
    reports: bool | None = None  # whether this worker is the one that reports, once that is known
    stepped: bool = False  # whether a worker of this process has made a step
    logged: int = 0  # exchanges of the worker that the metrics know of


_count = _Count()
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process


def note_optimizer(optimizer: Any) -> None:
    """Finish this optimizer, too, when the script ends another."""
    _optimizers.add(optimizer)


def unfinished() -> list[Any]:
    """Return the optimizers of this process that have not finished."""
    return [optimizer for optimizer in _optimizers if not optimizer.worker.finished]


def start_step() -> int:
    """Return how many steps this rank had made before this process: 0 in a new run."""
    _count.asked = True
    if _count.start is None:
        _count.start = Run.from_environment().start_step()
    return _count.start


def steps(total: int) -> Iterator[int]:
    """Count a worker's next `total` steps, or until all are asked to stop.

    A script may call it several times: each call owns the steps that follow those of the one
    before. A worker that was restarted makes only what its rank had not made: of three calls with
    5, killed at step 7, nothing in the first, 2, 3, 4 in the second, all in the third. For the
    epochs of a loader there is `epochs`.

    >>> [list(steps(3)) for epoch in range(2)]
    [[0, 1, 2], [0, 1, 2]]
    """
    checks.count("n", total)
    claim = Claim(total)
    made = claim.made(0, total)
    if made == total > 0:
        _report_skipped(claim.run, total)
    return claim.steps(range(made, total))


def note_steps(done: int) -> None:
    """Note how many steps the rank has made, where a trainer counts them itself."""
    _count.done = max(_count.done or 0, done)


class Claim:
    """The next steps of this worker, which one loop of the script owns.

    Args:
        total: how many there are, with those that its rank had made before.

    Attributes:
        first: how many steps other loops own that come before.
    """

    def __init__(self, total: int) -> None:
        self.run, self._start = Run.from_environment(), start_step()
        self.first = _count.claimed
        _count.claimed += total
        _count.done = max(self._start, _count.done or 0)
        self.run.begin(max(self._start, self.first), _count.claimed)

    def made(self, first: int, total: int) -> int:
        """Return how many of `total` steps, from the claim's step `first` on, were made before."""
        return min(max(0, self._start - self.first - first), total)

    def steps(self, rest: range) -> Iterator[int]:
        """Count these steps of the claim, or until all are asked to stop."""
        look_at = 0.0
        with in_loop():
            for step in rest:
                if time.monotonic() >= look_at:
                    if self.run.stopping():
                        return
                    look_at = time.monotonic() + _STOP_LOOK
                # With the one that is being made; loops may be within each other.
                _count.done = max(_count.done or 0, self.first + step + 1)
                yield step


@contextlib.contextmanager
def in_loop() -> Iterator[None]:
    """Note that the script is in the middle of its steps."""
    before, _count.looping = _count.looping, True
    try:
        yield
    finally:
        _count.looping = before


def _report_skipped(run: Run, total: int) -> None:
    if _count.loaded:
        _count.loaded = False  # once
        _log.warning(
            "Rank %d skips these %d steps: it made them before it was restarted. A script that "
            "restores an epoch of its own leaves steps out in this way: begin with epoch 0, or "
            "use `springline.epochs(loader, n)`.",
            run.rank,
            total,
        )
    else:
        _log.info("Rank %d made these %d steps before it was restarted.", run.rank, total)


def has_stepped() -> bool:
    """Whether a worker of this process has made a step."""
    return _count.stepped


def note_loaded() -> None:
    """Note that the script has loaded a checkpoint of its own, which may have its epoch."""
    _count.loaded = True


def counted() -> int | None:
    """Return the steps of this rank; None if `steps` does not count them."""
    return _count.done


def is_over() -> bool:
    """Whether the script counts its steps with `steps` or `epochs`, and has left the loop."""
    return _count.done is not None and not _count.looping


def note_worker(worker: Any) -> None:
    """Take a worker for this process's own: its rank's steps are counted on from there."""
    _count.worker, _count.logged = weakref.ref(worker), 0
    if directory() and not any(isinstance(h, ToLauncher) for h in _log.handlers):
        _log.addHandler(ToLauncher(logging.WARNING))
    if _count.done is None:  # other machines may not see the run's directory
        _count.start = max(_count.start or 0, int(worker.start_step))
    _count.reports = None


def note_first_step(worker: Worker) -> None:
    """Warn of a worker that was restarted and begins at its first step again."""
    _count.stepped = True
    if worker.start_step and not _count.asked:
        _log.warning(
            "Rank %d had made %d steps before it was restarted, and its script begins with the "
            "first again. Count them with `for step in springline.steps(n)`, or begin at "
            "`springline.start_step()`.",
            worker.rank,
            worker.start_step,
        )


def finish_all() -> None:
    """Finish all optimizers of this process: other workers wait for them in their rounds."""
    for optimizer in list(_optimizers):
        optimizer.finish()


def wait_for_all(worker: Worker, timeout: float | None, steps: float = math.inf) -> bool:
    """Wait until every rank has finished or does not come back; see `Worker.final`.

    A rank that has made more than `steps` steps is back for others, and has finished these.
    """
    center, run = worker.center, Run.from_environment()
    seen = dict.fromkeys(range(center.settings["workers"]), time.monotonic())

    def finished() -> set[int]:
        known = center.progress() if steps < math.inf else []
        return {
            worker.rank,
            *center.finished(),
            *(rank for rank, made in enumerate(known) if made.steps > steps),
        }

    def missing() -> list[int]:
        worker.member.confirm_finished()
        given_up = center.given_up()
        given_up = run.given_up() if given_up is None else given_up
        now = time.monotonic()
        seen.update(dict.fromkeys(center.members(), now))
        if given_up is None:  # it is not started again
            given_up = [rank for rank, at in seen.items() if now - at > _UNSEEN]
        return sorted(seen.keys() - finished() - {*given_up})

    def done() -> bool:
        if not missing():
            return True
        time.sleep(_END_LOOK)
        return False

    wait_until(done, missing, timeout, "all workers to finish")
    _count.reports = worker.rank == min(finished())
    return _count.reports


def log(**values: float) -> None:
    """Add numbers (loss, accuracy, ...) to the run's metrics, for the screen and the plot.

    The first line after an exchange also has the distance from the center, the outer learning rate
    and the bytes that this process has exchanged.

    >>> log(loss=0.25)
    """
    worker, done, run = _count.worker(), _count.done, Run.from_environment()
    if done is None:
        done = worker.start_step + worker.local_step if worker else 0
    if line := (_of_exchange(worker) if run.directory else {}) | values:  # else it were a restart
        run.log(done, line)


def log_numbers(values: Mapping[str, Any]) -> None:
    """Log those of a trainer's own metrics that are one number, under a name that is free."""
    log(**checks.numbers(values))


def _of_exchange(owner: Any) -> dict[str, float]:
    """Return what is known of a worker's last exchange, once."""
    worker = getattr(owner, "worker", owner)  # that of an optimizer in TensorFlow's eager mode
    exchanges = getattr(worker, "exchanges", 0)
    if exchanges == _count.logged:
        return {}
    _count.logged = exchanges
    figures = {DISTANCE: worker.distance, OUTER_RATE: worker.outer_rate()}
    known = {name: value for name, value in figures.items() if not math.isnan(value)}
    return {BYTES: worker.bytes_exchanged} | known


@can_do_without("The report")
def report(text: str) -> None:
    """Report how it ended: a script alone prints it, `springline run` shows it after the run.

    In a run it is that of the worker on which `final()` was true, with the version of the
    center; rank 0's, if the script does not call `final()`.
    """
    run, worker = Run.from_environment(), _count.worker()
    if run.directory and _count.reports and hasattr(worker, "center"):
        with contextlib.suppress(CenterError):
            text = f"{text} (center version {worker.center.version:,})"
    print(text, flush=True)
    if run.directory and (run.rank == 0 if _count.reports is None else _count.reports):
        run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(run.directory / REPORT, f"{text}\n")


def finish_at_exit(finish: Callable[[], None], process: int) -> None:
    """Finish when the script ends; after an error only leave, which the process's end does.

    Args:
        finish: makes the last exchange and leaves.
        process: the one that trains; nothing happens in those that it has forked.
    """
    if os.getpid() == process and getattr(sys, "last_value", None) is None:
        try:
            finish()
        except Exception:
            _log.exception("The last exchange failed")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler has no other way to report it
