"""An exchange in the background: the training loop goes on meanwhile.

It works on a snapshot `s` of the worker's parameters, which the exchange turns into `s'`. There are
two ways to fold that in:

- *overlap*, when it is back: `x ← x + (s' − s)`. For elastic averaging that is `x − δ`, for the
  others the reply with the steps taken meanwhile kept, but for rounding.
- *delay*, a fixed number of steps later: the worker adopts the center as it would have at once,
  which drops the steps taken meanwhile, but for what mixing keeps. The result does not depend on
  how long the exchange takes.

The background takes the snapshot, too, while the training loop computes its next gradients; its
next step waits until `s` is taken. If something else changes parameters in between, `s` may hold
some of that, which does no harm: what is folded in is the exchange of `s`, whatever it was.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from springline.center.layout import Bytes, Entry
from springline.center.local import Local
from springline.errors import CenterError

if TYPE_CHECKING:
    from springline.worker import Worker

Array = NDArray[Any]
Jobs = SimpleQueue[Callable[[], None] | None]


class _Block(NamedTuple):
    """Elements that stay in cache between two uses, as in an exchange."""

    x: Array
    reply: Array  # s, then s'
    move: Array | None  # s, then s' − s; a delay needs none


class Background:
    """The exchanges of a worker, at most one in flight.

    Args:
        worker: whose.
        delay: steps after which an exchange is folded in; 0 to do it when it is back.

    Attributes:
        due: with a delay, the local step at which the exchange in flight is folded in.
    """

    def __init__(self, worker: Worker, delay: int = 0) -> None:
        self._worker = weakref.proxy(worker)
        self._delay = delay
        self.due = 0
        self._flight: Future[bool] | None = None
        self._fragment = 0  # that is in flight
        self._entries: list[Entry] = []  # that are
        self._taken = threading.Event()  # the last snapshot
        self._taken.set()
        self._process = os.getpid()
        layout, rule = worker.layout, worker.rule
        self._reply = Local(layout, rule)  # s, then s'
        move = None if delay else layout.allocate()
        self._blocks: list[list[_Block]] = [[] for _ in range(layout.fragments)]
        for shard in layout.shards(whole=False):
            for block in layout.blocks(shard, whole=False, elementwise=True):
                x, reply = block.view(worker.local.x), block.view(self._reply.x)
                views = _Block(x, reply, None if move is None else block.view(move))
                self._blocks[block.fragment].append(views)
        self._jobs: Jobs = SimpleQueue()
        # A daemon: a script that ends with an error does not wait for its exchange.
        threading.Thread(
            target=_serve, args=(self._jobs,), name="springline exchange", daemon=True
        ).start()
        weakref.finalize(self, self._jobs.put, None)

    def settle(self) -> None:
        """Wait until the snapshot in flight is taken; before parameters or gradients change."""
        if os.getpid() != self._process:
            raise CenterError(
                "The exchanges in the background stayed in the process that this one was forked "
                "from. Make the optimizer in the process that trains."
            )
        self._taken.wait()

    def step(self, due: bool) -> bool:
        """Fold in what has come back; if an exchange is due, start it. Return whether it folded.

        If one is still in flight then, a worker that meets others in rounds waits for it; else the
        exchange that is due is skipped. With a delay each is folded in exactly when it has passed.
        """
        worker, flight, folded = self._worker, self._flight, False
        if self._delay:
            if flight and worker.local_step >= self.due:
                folded = self.wait()
        elif flight and (flight.done() or (due and worker.in_rounds)):
            folded = self.wait()
        if due and not self._flight:
            self._start()
        return folded

    def wait(self) -> bool:
        """Wait for what is in flight and fold it in; raise what went wrong there."""
        if not self._flight:
            return False
        error = self._flight.exception()
        exchanged = error is not None or self._flight.result()
        self._flight = None
        worker = self._worker
        worker.gather()
        try:
            if not exchanged:
                worker.take(worker.local)
            elif not self._delay:
                self._move_on(worker.local)
            elif not error:  # else it is not known what the center has, and `x` stays
                self._adopt(worker.local)
                if not worker.rule.mixing:  # the steps made meanwhile are gone
                    worker.exchanged_at[self._fragment] = worker.local_step
        finally:
            worker.scatter()
        if error:
            raise error
        return True

    def _move_on(self, local: Local) -> None:
        """`x ← x + (s' − s)`."""
        with np.errstate(all="ignore"):  # after an error `s` may hold NaN, and then `x` does too
            for x, _, move in self._blocks[self._fragment]:
                if move is not None:
                    np.add(x, move, out=x)
        if local.base is not None and self._reply.base is not None:
            here = self._worker.layout.fragment_bytes[self._fragment]
            np.copyto(local.base[here], self._reply.base[here])  # of what was exchanged, the new

    def _adopt(self, local: Local) -> None:
        """Adopt the center now; what is not a parameter takes the center's value."""
        rule, reply = self._worker.rule, self._reply
        for e in self._entries:
            x = e.view(local.x)
            if e.kind == "buffer" or local.base is None or reply.base is None:
                np.copyto(x, e.view(reply.x))
            else:
                rule.adopt(x, e.view(local.base), e.view(reply.base), np.empty_like(x))

    def drop(self) -> None:
        """Wait for what is in flight and forget it."""
        if self._flight:
            self._flight.exception()
            self._flight = None

    def _start(self) -> None:
        worker = self._worker
        worker.gather()
        worker.hand_over(self._reply)
        self._fragment = worker.fragment
        self._entries = [e for e in worker.layout.entries if e.fragment == self._fragment]
        self.due = worker.local_step + self._delay
        taken, flight = threading.Event(), Future[bool]()
        # Without `self`, which would not be freed while the exchange is under way.
        here = worker.layout.fragment_bytes[self._fragment]
        blocks = self._blocks[self._fragment]
        copies = _copies(worker.local, self._reply, here)
        work = partial(_exchange, worker.exchange_with, self._reply, blocks, copies, taken, flight)
        self._jobs.put(work)
        self._taken, self._flight = taken, flight  # now that the job will set them

    def save(self, copy: Callable[[Array], Any] = np.copy) -> dict[str, Any] | None:
        """Return what is in flight and is not folded in yet, once it is back; None if nothing is.

        Only with a delay: without one, it is folded in first.

        Args:
            copy: makes of an array what is to be saved.
        """
        if not (self._flight and self._delay):
            return None
        if error := self._flight.exception():
            self._flight = None
            raise error
        return {"fragment": self._fragment, "due": self.due} | {
            key: {e.name: copy(e.view(buffer)) for e in self._entries}
            for key, buffer in self._buffers()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `save` returned."""
        self._fragment, self.due = state["fragment"], state["due"]
        self._entries = [e for e in self._worker.layout.entries if e.name in state["x"]]
        for key, buffer in self._buffers():
            for e in self._entries:
                np.copyto(e.view(buffer), np.asarray(state[key][e.name]))
        self._flight = Future()
        self._flight.set_result(True)

    def _buffers(self) -> list[tuple[str, Bytes]]:
        both = ("x", self._reply.x), ("base", self._reply.base)
        return [(key, buffer) for key, buffer in both if buffer is not None]


def _copies(local: Local, reply: Local, here: slice) -> list[tuple[Bytes, Bytes]]:
    """Return what a snapshot copies beside `x`."""
    pairs = (local.a, reply.a), (local.base, reply.base)
    return [(a[here], b[here]) for a, b in pairs if a is not None and b is not None]


def _exchange(
    exchange: Callable[[Local], bool],
    reply: Local,
    blocks: Sequence[_Block],
    copies: Sequence[tuple[Bytes, Bytes]],
    taken: threading.Event,
    flight: Future[bool],
) -> None:
    """Exchange a snapshot, and report by how much that moved it."""
    try:
        try:
            for x, s, move in blocks:
                np.copyto(s, x)
                if move is not None:
                    np.copyto(move, s)  # not x, which may have changed
            for mine, snapshot in copies:
                np.copyto(snapshot, mine)
        finally:
            taken.set()
        try:
            exchanged = exchange(reply)
        finally:  # after an error some blocks have been exchanged; the others did not move
            with np.errstate(all="ignore"):
                for _, after, move in blocks:
                    if move is not None:
                        np.subtract(after, move, out=move)
    except BaseException as error:  # it is raised in the training loop
        flight.set_exception(error)
    else:
        flight.set_result(exchanged)


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the worker
