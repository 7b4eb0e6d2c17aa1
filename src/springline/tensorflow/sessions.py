"""TensorFlow's own start of a session, where the graph has a center: a living one is joined.

`MonitoredTrainingSession` and `Supervisor` leave the start to a `SessionManager`, with the hook or
without, and with whatever saver the script has. A session that is chief restores a checkpoint or
initialises; here it does neither where the servers hold the center already. Another one without
the hook initialises what is on its own device, which it would else wait for in silence.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from springline.tensorflow.private import graph_of
from springline.tensorflow.step import ancestors, is_elsewhere
from springline.tensorflow.trio import Variable, v1

# Collections of a graph.
_ALIVE = "springline/alive"  # tensors: whether each center is initialised
_WORKER = "springline/worker"  # the worker's device
_HOOK = "springline/hook"  # names of optimizers whose hook starts the session
_initialized: WeakSet[tf.Graph] = WeakSet()  # their workers' own variables outlive a session
_log = logging.getLogger("springline")


def note_center(center: Variable, worker_device: str) -> None:
    """Let the sessions of its graph join a center if it lives."""
    with tf.control_dependencies(None), v1.device(center.device):
        # An identity: TensorFlow complains of an `is_variable_initialized` that nothing uses.
        v1.add_to_collection(_ALIVE, tf.identity(v1.is_variable_initialized(center)))
    if worker_device not in v1.get_collection(_WORKER):
        v1.add_to_collection(_WORKER, worker_device)


def note_hook(name: str) -> None:
    """Leave what is on the worker's own device to a hook."""
    v1.add_to_collection(_HOOK, name)


def own_variables(graph: tf.Graph) -> tuple[list[Variable], list[Variable]]:
    """Return the global variables on the worker's own device.

    And those of them that start from its local variables, which a session initialises later.
    """
    devices = graph.get_collection(_WORKER)
    variables = graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
    own = [v for v in variables if not any(is_elsewhere(v.device, device) for device in devices)]
    locals_ = {v.op for v in graph.get_collection(v1.GraphKeys.LOCAL_VARIABLES)}
    late = [v for v in own if not locals_.isdisjoint(ancestors([v.initial_value]))]
    return own, late


def join_living() -> None:
    """Let every `SessionManager` join a living center; other graphs are not touched."""
    manager = v1.train.SessionManager
    manager.prepare_session = _before(manager.prepare_session, _prepare)
    manager.wait_for_session = _before(manager.wait_for_session, _wait)


def _before(method: Any, change: Callable[[dict[str, Any], Any], None]) -> Any:
    """Let a method's arguments be changed first, in a session like the one that it will make."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def start(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        graph, target = graph_of(given.arguments["self"]), given.arguments["master"]
        if target and graph.get_collection(_ALIVE):  # else nothing outlives a session
            with v1.Session(target, graph, given.arguments["config"]) as session:
                change(given.arguments, session)
        return method(*given.args, **given.kwargs)

    return start


def _prepare(arguments: dict[str, Any], session: Any) -> None:
    """How a chief starts."""
    graph, saver = session.graph, arguments["saver"]
    if not all(session.run(graph.get_collection(_ALIVE))):
        return
    _log.info("The servers hold a center: it is joined, and no checkpoint is restored.")
    folder = arguments["checkpoint_dir"]
    state = v1.train.get_checkpoint_state(folder) if saver and folder else None
    if state:  # so that the saver removes the oldest
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    own, late = own_variables(graph)
    new = [] if graph.get_collection(_HOOK) else [v.initializer for v in own if v not in late]
    arguments.update(saver=None, init_op=new, init_fn=None)


def _wait(arguments: dict[str, Any], session: Any) -> None:
    """How any other worker starts."""
    graph = session.graph
    if graph.get_collection(_HOOK) or graph in _initialized:
        return
    own, late = own_variables(graph)
    if late:
        raise RuntimeError(
            f"{late[0].name!r} starts from this worker's variables, which are set to the center "
            "only after a session has started: without the hook it would wait for ever. Give the "
            "session the hook that `make_session_run_hook` returns."
        )
    session.run([v.initializer for v in own])
    _initialized.add(graph)
