"""TensorFlow's own start of a session, where the graph has a center: a living one is joined.

`MonitoredTrainingSession` and `Supervisor` leave the start to a `SessionManager`, with the hook or
without, and with whatever saver the script has. A session that is chief restores a checkpoint or
initialises; here it only initialises what is not where the center is already. What is on a worker's
own device that worker initialises, which it would otherwise wait for without a word. With the hook
it is then set to the center, before any other hook saves it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from springline.tensorflow.private import graph_of, readiness_of
from springline.tensorflow.step import ancestors, is_elsewhere
from springline.tensorflow.trio import Variable, v1

if TYPE_CHECKING:
    from springline.tensorflow.optimizer import CenterOptimizer
    from springline.tensorflow.start import Start

    OptimizersOf = Callable[[tf.Graph], list[CenterOptimizer]]

# Collections of a graph, which one without an optimizer has too.
_ALIVE = "springline/alive"  # tensors: whether each center is initialised
_WORKER = "springline/worker"  # the worker's device
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
    devices = [tf.compat.as_str(device) for device in graph.get_collection(_WORKER)]
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
            with v1.Session(target, graph, given.arguments["config"]) as session:
                change(given.arguments, session, optimizers, hook)
        made = method(*given.args, **given.kwargs)
        if hook and made is not None:
            hook.join(made)
            if change is _prepare:
                hook.mark(made)
        return made

    return start


def _prepare(
    arguments: dict[str, Any], session: Any, optimizers: list[CenterOptimizer], hook: Start | None
) -> None:
    """How a chief starts."""
    saver, init_fn = arguments["saver"], arguments["init_fn"]
    if init_fn and optimizers:
        init_fn = functools.partial(_load, init_fn, optimizers)
    living = all(session.run(session.graph.get_collection(_ALIVE)))
    if not living or (hook and not hook.is_marked(session)):  # or it was never finished
        if not hook:
            _refuse_late(session.graph)
        arguments["init_fn"] = init_fn
        return
    named = arguments["checkpoint_filename_with_path"]
    level = logging.WARNING if named else logging.INFO
    what = named or "no checkpoint"
    _log.log(level, "The servers hold a center: it is joined, and %s is not restored.", what)
    folder = arguments["checkpoint_dir"]
    state = v1.train.get_checkpoint_state(folder) if saver and folder else None
    if state:  # so that the saver removes the oldest
        saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    new = hook.initialize_new if hook else _new(arguments, session)
    arguments.update(saver=None, init_op=new, init_fn=None)


def _wait(
    arguments: dict[str, Any], session: Any, optimizers: list[CenterOptimizer], hook: Start | None
) -> None:
    """How any other worker starts; with the hook its own variables are new when it joins."""
    if not hook:
        own, _ = own_variables(session.graph)
        mine = {v.initializer for v in own}
        session.run(
            [initializer for initializer in _new(arguments, session) if initializer in mine]
        )


def _new(arguments: dict[str, Any], session: Any) -> list[Any]:
    """Return the initialisers of the global variables that are not initialised, without the hook.

    They are those that the manager reports; an operation of the script's own may report others.
    """
    _refuse_late(session.graph)
    ready = readiness_of(arguments["self"])
    missing = [] if ready is None else session.run(ready).tolist()
    variables = session.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
    return [v.initializer for v in variables if v.op.name.encode() in missing]


def _refuse_late(graph: tf.Graph) -> None:
    """Refuse what only the hook can start from the center."""
    _, late = own_variables(graph)
    if late:
        raise RuntimeError(
            f"{late[0].name!r} starts from this worker's local variables, which are set to the "
            "center only after a session has started: without the hook it would start from "
            "something else, or wait for ever. Give the session the hook that the optimizer's "
            "`make_session_run_hook` returns."
        )


def _load(init_fn: Any, optimizers: list[CenterOptimizer], session: Any) -> None:
    """Run an `init_fn`, and fail if it has loaded what the center will replace."""
    before = [optimizer.whether_loaded(session) for optimizer in optimizers]
    init_fn(session)
    after = [optimizer.whether_loaded(session) for optimizer in optimizers]
    for (trios, old), (_, new) in zip(before, after, strict=True):
        for trio, was, is_ in zip(trios, old, new, strict=True):
            loaded = is_ and not was
            if loaded and not np.array_equal(*session.run([trio.local, trio.center])):
                raise RuntimeError(
                    f"The `init_fn` has loaded {trio.local.name!r}, which the session sets to the "
                    "center: what it has loaded would be lost. Load it into the center: let the "
                    "`init_fn` restore with a saver that the optimizer's `swapping_saver` returns."
                )
