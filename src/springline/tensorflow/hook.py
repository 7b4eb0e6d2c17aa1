"""The hook for `MonitoredTrainingSession`: start from the center, exchange, join what is alive."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from springline.progress import note_worker
from springline.tensorflow.cluster import servers_answered, servers_not_needed
from springline.tensorflow.start import Start
from springline.tensorflow.step import Step, ancestors
from springline.tensorflow.trio import v1

if TYPE_CHECKING:
    from springline.tensorflow.optimizer import CenterOptimizer

_log = logging.getLogger("springline")
FAREWELL = 10.0  # seconds for the servers to hear that this worker ends


class CenterHook(v1.train.SessionRunHook):
    """Made by `make_session_run_hook`.

    The exchange is a run of its own after the run that made it due, which is the fastest way.
    """

    start_step = 0  # with `local_step`: what `springline.log` counts
    local_step = 0

    def __init__(self, optimizer: CenterOptimizer) -> None:
        self._optimizer = optimizer
        self._reached: dict[tuple[str, ...], list[Step]] = {}  # by what is fetched

    def begin(self) -> None:
        """Add what a session needs to the graph, once: a later one may find it finalized."""
        self._start = self._optimizer.started = self._optimizer.started or Start(self._optimizer)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Start from the center, if the session was not made by a `SessionManager`."""
        self._start.join(session)
        note_worker(self)
        servers_answered()
        self._optimizer.start_in(session)

    def before_run(self, run_context: Any) -> Any:
        """Ask which local step a run ends with, if it makes one."""
        steps = self._steps_in(run_context)
        if not steps:
            return None
        seen = [(step.count, list(step.feeds.values())) for step in steps]
        alone = [step for step in steps if step.stands_alone]  # the others exchange in this run
        return v1.train.SessionRunArgs(seen, {step.exchanged: 0 for step in alone})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Exchange if it is due."""
        if run_values.results is None:
            return
        steps = self._steps_in(run_context)
        for step, (count, values) in zip(steps, run_values.results, strict=True):
            self.local_step = int(count)
            if step.stands_alone and count % self._optimizer._period == 0:
                feed = dict(zip(step.feeds, values, strict=True))
                self._optimizer.exchange_in(run_context.session, step.exchange, feed)

    def end(self, session: Any) -> None:
        """Leave the center. Whether its servers live does not matter any more."""
        options = v1.RunOptions(timeout_in_ms=int(FAREWELL * 1000))
        try:
            self._optimizer.end_in(session, options)
        except tf.errors.OpError as error:
            _log.warning("Could not report to the servers that this worker ends: %s", error.message)
        servers_not_needed()

    def _steps_in(self, run_context: Any) -> list[Step]:
        """Return the local steps that a run makes."""
        graph = run_context.session.graph
        fetches = tf.nest.flatten(run_context.original_args.fetches, expand_composites=True)
        elements = [graph.as_graph_element(fetch) for fetch in fetches]
        key = tuple(element.name for element in elements)
        if key not in self._reached:
            operations = ancestors(elements)
            self._reached[key] = [s for s in self._optimizer._steps if s.count.op in operations]
        return self._reached[key]
