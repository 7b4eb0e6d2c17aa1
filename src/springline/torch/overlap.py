"""An exchange in the background: the training loop goes on meanwhile.

It works on a snapshot `s` of the worker's parameters, which the exchange turns into `s'`. When it
is back, `x ← s' + (x − s)`: for elastic averaging that is `x − δ`, for model averaging and AGN the
reply with the steps taken meanwhile kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np

from springline.center.center import Local
from springline.torch.binding import Binding
from springline.worker import Worker

Jobs = SimpleQueue[Callable[[], None] | None]


class Overlap:
    """The exchanges of a worker, at most one in flight."""

    def __init__(self, worker: Worker, binding: Binding) -> None:
        self._worker = worker
        self._binding = binding
        self._flight: Future[None] | None = None
        self._reply = Local(worker.layout, worker.rule)  # s, then s'
        self._snapshot = worker.layout.allocate()  # s
        layout, buffers = worker.layout, (worker.local.x, self._snapshot, self._reply.x)
        self._blocks = [  # as in an exchange, so that a block stays in cache while it is folded
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

    def step(self, due: bool) -> bool:
        """Fold in what has come back; if an exchange is due, start it. Return whether it folded.

        If one is still in flight then, model averaging waits for it and the others skip theirs.
        """
        flight, folded = self._flight, False
        if flight and (flight.done() or (due and self._worker.rule.synchronous)):
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
            for x, s, reply in self._blocks:
                np.subtract(x, s, out=x)
                np.add(x, reply, out=x)
        self._binding.scatter()
        if error:
            raise error
        if self._worker.local.copy is not None and self._reply.copy is not None:
            np.copyto(self._worker.local.copy, self._reply.copy)
        return True

    def drop(self) -> None:
        """Wait for what is in flight and forget it."""
        if self._flight:
            self._flight.exception()
            self._flight = None

    def _start(self) -> None:
        self._binding.gather()
        self._worker.snapshot(self._reply)
        flight: Future[None] = Future()
        worker, reply, snapshot = self._worker, self._reply, self._snapshot

        def exchange() -> None:
            try:
                np.copyto(snapshot, reply.x)  # here, so that the training loop makes one copy only
                worker.exchange_with(reply)
            except BaseException as error:  # it is raised in the training loop
                flight.set_exception(error)
            else:
                flight.set_result(None)

        self._flight = flight
        self._jobs.put(exchange)


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
