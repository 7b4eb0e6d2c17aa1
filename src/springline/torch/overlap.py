"""An exchange in the background: the training loop goes on meanwhile.

It works on a snapshot `s` of the worker's parameters, which the exchange turns into `s'`. When it
is back, `x ← s' + (x − s)`: for elastic averaging that is `x − δ`, for model averaging and AGN the
reply with the steps taken meanwhile kept.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from springline.center.center import Local
from springline.torch.binding import Binding
from springline.worker import Worker


class Overlap:
    """The exchanges of a worker, at most one in flight."""

    def __init__(self, worker: Worker, binding: Binding) -> None:
        self._worker = worker
        self._binding = binding
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="springline")
        self._flight: Future[None] | None = None
        self._reply = Local(worker.layout, worker.rule)  # s, then s'
        self._snapshot = worker.layout.allocate()  # s
        views = (worker.layout.views(b) for b in (worker.local.x, self._snapshot, self._reply.x))
        self._views = list(zip(*(view.values() for view in views), strict=True))

    def step(self, due: bool) -> None:
        """Fold in what has come back; if an exchange is due, start it.

        If one is still in flight then, model averaging waits for it and the others skip theirs.
        """
        if self._flight and (self._flight.done() or (due and self._worker.rule.synchronous)):
            self.wait()
        if due and not self._flight:
            self._binding.gather()
            self._worker.snapshot(self._reply)
            np.copyto(self._snapshot, self._reply.x)
            self._flight = self._thread.submit(self._worker.exchange_with, self._reply)

    def wait(self) -> None:
        """Wait for what is in flight and fold it in; raise what went wrong there."""
        if not self._flight:
            return
        flight, self._flight = self._flight, None
        flight.result()
        self._binding.gather()
        for x, s, reply in self._views:
            np.subtract(x, s, out=x)
            np.add(x, reply, out=x)
        if self._worker.local.copy is not None and self._reply.copy is not None:
            np.copyto(self._worker.local.copy, self._reply.copy)
        self._binding.scatter()
