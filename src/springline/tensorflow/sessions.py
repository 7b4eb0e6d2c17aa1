"""TensorFlow's own start of a session, where the graph has a center: a living one is joined.

`MonitoredTrainingSession` and `Supervisor` leave the start to a `SessionManager`, with the hook or
without, and with whatever saver the script has. A session that is chief restores a checkpoint or
initialises; here it does neither where the servers hold the center already. What is on a worker's
own device it initialises itself, which else it would wait for in silence. With the hook it is then
set to the center, before any other hook saves it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import tensorflow as tf

from springline.tensorflow.private import graph_of
from springline.tensorflow.step import ancestors, is_elsewhere
from springline.tensorflow.trio import Variable, v1

if TYPE_CHECKING:
    from springline.tensorflow.optimizer import CenterOptimizer
    from springline.tensorflow.start import Start

    OptimizersOf = Callable[[tf.Graph], list[CenterOptimizer]]

# Collections of a graph, which one without an optimizer has too.
_ALIVE = "springline/alive"  # tensors: whether each center is initialised
_WORKER = "springline/worker"  # the worker's device
_initialized: WeakSet[tf.Graph] = WeakSet()  # their workers' own variables outlive a session
_log = logging.getLogger("springline")


def note_center(center: Variable, worker_device: str) -> None:
    """Let the sessions of its graph join a center if it lives."""
    with tf.control_dependencies(None), v1.device(center.device):
        # An identity: TensorFlow complains of an `is_variable_initialized` that nothing uses.
        v1.add_to_collection(_ALIVE, tf.identity(v1.is_variable_initialized(center)))
    if worker_device not in v1.get_collection(_WORKER):
        v1.add_to_collection(_WORKER, worker_device)


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


def join_living(optimizers_of: OptimizersOf) -> None:
    """Let every `SessionManager` join a living center; other graphs are not touched."""
    manager = v1.train.SessionManager
    manager.prepare_session = _joining(manager.prepare_session, _prepare, optimizers_of)
    manager.wait_for_session = _joining(manager.wait_for_session, _wait, optimizers_of)


def _joining(method: Any, change: Callable[..., None], optimizers_of: OptimizersOf) -> Any:
    """Let a method's arguments be changed first, in a session like the one that it will make."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def start(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        graph, target = graph_of(given.arguments["self"]), given.arguments["master"]
        optimizers = optimizers_of(graph)
        hook: Start | None = next((each.started for each in optimizers if each.started), None)
        if target and graph.get_collection(_ALIVE):  # else nothing outlives a session
            new = _own_initializers(graph, hook is not None)
            with v1.Session(target, graph, given.arguments["config"]) as session:
                change(given.arguments, session, optimizers, new)
            _initialized.add(graph)
        made = method(*given.args, **given.kwargs)
        if hook and made is not None:
            hook.join(made)
        return made

    return start


def _own_initializers(graph: tf.Graph, hook: bool) -> list[Any]:
    """Return the initialisers of what is on the worker's own device, if it has not run them yet."""
    own, late = own_variables(graph)
    if late and not hook:
        raise RuntimeError(
            f"{late[0].name!r} starts from this worker's variables, which are set to the center "
            "only after a session has started: without the hook it would start from something "
            "else, or wait for ever. Give the session the hook that `make_session_run_hook` "
            "returns."
        )
    return [] if graph in _initialized else [v.initializer for v in own if v not in late]


def _prepare(
    arguments: dict[str, Any], session: Any, optimizers: list[CenterOptimizer], new: list[Any]
) -> None:
    """How a chief starts."""
    saver, init_fn = arguments["saver"], arguments["init_fn"]
    if not all(session.run(session.graph.get_collection(_ALIVE))):
        if init_fn and optimizers:
            arguments["init_fn"] = functools.partial(_load, init_fn, optimizers)
        return
    _log.info("The servers hold a center: it is joined, and no checkpoint is restored.")
    folder = arguments["checkpoint_dir"]
    state = v1.train.get_checkpoint_state(folder) if saver and folder else None
    if state:  # so that the saver removes the oldest
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    arguments.update(saver=None, init_op=new, init_fn=None)


def _wait(
    arguments: dict[str, Any], session: Any, optimizers: list[CenterOptimizer], new: list[Any]
) -> None:
    """How any other worker starts."""
    session.run(new)


def _load(init_fn: Any, optimizers: list[CenterOptimizer], session: Any) -> None:
    """Run an `init_fn`, and fail if it has loaded what the center will replace."""
    init_fn(session)
    for optimizer in optimizers:
        for trio, loaded in zip(*optimizer.whether_loaded(session), strict=True):
            if loaded and not np.array_equal(*session.run([trio.local, trio.center])):
                raise RuntimeError(
                    f"The `init_fn` has loaded {trio.local.name!r}, which the session sets to the "
                    "center: what it has loaded would be lost. Load it into the center: let the "
                    "`init_fn` restore with a saver that `swapping_saver` of the optimizer returns."
                )
