"""An exchange in the background: the training loop goes on meanwhile.

It works on a snapshot `s` of the worker's parameters, which the exchange turns into `s'`. When it
is back, `x ← x + (s' − s)`: for elastic averaging that is `x − δ`, for model averaging and AGN the
reply with the steps taken meanwhile kept, but for rounding. The background takes the snapshot, too,
while the training loop computes its next gradients; its next step waits until `s` is taken. If
something else changes parameters in between, `s` may hold some of that, which does no harm: what is
folded in is the exchange of `s`, whatever it was.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.center import Local
from springline.errors import CenterError
from springline.torch.binding import Binding
from springline.worker import Worker

Jobs = SimpleQueue[Callable[[], None] | None]
Blocks = Sequence[tuple[NDArray[Any], ...]]  # x, room for s' − s, room for s'


class Overlap:
    """The exchanges of a worker, at most one in flight."""

    def __init__(self, worker: Worker, binding: Binding) -> None:
        self._worker = worker
        self._binding = binding
        self._flight: Future[None] | None = None
        self._taken = threading.Event()  # the last snapshot
        self._taken.set()
        self._process = os.getpid()
        self._reply = Local(worker.layout, worker.rule)  # s, then s'
        self._move = worker.layout.allocate()  # s, then s' − s
        layout, buffers = worker.layout, (worker.local.x, self._move, self._reply.x)
        self._blocks: Blocks = [  # as in an exchange: a block stays in cache between two uses
            tuple(block.view(buffer) for buffer in buffers)
            for shard in layout.shards(whole=False)
            for block in layout.blocks(shard, whole=False, elementwise=True)
        ]
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
                "The exchanges of `overlap=True` stayed in the process that this one was forked "
                "from. Make the optimizer in the process that trains."
            )
        self._taken.wait()

    def step(self, due: bool) -> bool:
        """Fold in what has come back; if an exchange is due, start it. Return whether it folded.

        If one is still in flight then, a worker that meets others in rounds waits for it; else the
        exchange that is due is skipped.
        """
        flight, folded = self._flight, False
        if flight and (flight.done() or (due and self._worker.in_rounds)):
            folded = self.wait()
        if due and not self._flight:
            self._start()
        return folded

    def wait(self) -> bool:
        """Wait for what is in flight and fold it in; raise what went wrong there."""
        if not self._flight:
            return False
        error = self._flight.exception()
        self._flight = None
        self._binding.gather()
        with np.errstate(all="ignore"):  # after an error `s` may hold NaN, and then `x` does too
            for x, move, _ in self._blocks:
                np.add(x, move, out=x)
        self._binding.scatter()
        if self._worker.local.base is not None and self._reply.base is not None:
            np.copyto(self._worker.local.base, self._reply.base)  # of what was exchanged, the new
        if error:
            raise error
        return True

    def drop(self) -> None:
        """Wait for what is in flight and forget it."""
        if self._flight:
            self._flight.exception()
            self._flight = None

    def _start(self) -> None:
        self._binding.gather()
        self._worker.hand_over(self._reply)
        taken, flight = threading.Event(), Future[None]()
        # Without `self`, which would not be freed while the exchange is under way.
        arguments = (self._worker, self._reply, self._blocks, taken, flight)
        self._jobs.put(partial(_exchange, *arguments))
        self._taken, self._flight = taken, flight  # now that somebody will set them


def _exchange(
    worker: Worker, reply: Local, blocks: Blocks, taken: threading.Event, flight: Future[None]
) -> None:
    """Exchange a snapshot, and tell by how much that moved it."""
    try:
        try:
            for x, move, s in blocks:
                np.copyto(s, x)
                np.copyto(move, s)  # not x, which may have changed
            local = worker.local
            for mine, snapshot in ((local.a, reply.a), (local.base, reply.base)):
                if mine is not None and snapshot is not None:
                    np.copyto(snapshot, mine)
        finally:
            taken.set()
        try:
            worker.exchange_with(reply)
        finally:  # after an error some blocks have been exchanged; the others did not move
            with np.errstate(all="ignore"):
                for _, move, after in blocks:
                    np.subtract(after, move, out=move)
    except BaseException as error:  # it is raised in the training loop
        flight.set_exception(error)
    else:
        flight.set_result(None)


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
