"""What TensorFlow keeps private and springline needs all the same. No other file may use any of it.

`tests/tensorflow_front/test_tf_private.py` names each attribute, and fails where TensorFlow has
dropped it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from springline.tensorflow.trio import v1

# An optimizer's settings, the learning rate first.
SETTINGS: dict[type, tuple[str, ...]] = {
    v1.train.GradientDescentOptimizer: ("_learning_rate",),
    v1.train.MomentumOptimizer: ("_learning_rate", "_momentum"),
    v1.train.AdagradOptimizer: ("_learning_rate", "_initial_accumulator_value"),
    v1.train.AdamOptimizer: ("_lr", "_beta1", "_beta2", "_epsilon"),
}


def settings_of(opt: Any) -> list[float] | None:
    """Return what an optimizer of these kinds was made with, or None for any other."""
    names = SETTINGS.get(type(opt))
    if names is None or getattr(opt, "_use_nesterov", False):
        return None
    values = [getattr(opt, name) for name in names]
    return [float(value() if callable(value) else value) for value in values]


def learning_rate_of(opt: Any) -> Any:
    """Return an optimizer's learning rate as it is now; None if it has none by a known name."""
    rate = getattr(opt, "_learning_rate", getattr(opt, "_lr", None))
    return rate() if callable(rate) else rate


def prepare_once(opt: Any) -> None:
    """Let an optimizer make the tensors of its settings now, and never again."""
    opt._prepare()
    opt._prepare = lambda: None


def restore_slot(opt: Any, position: Any, name: str, variable: Any) -> None:
    """Let an optimizer take a slot from a `tf.train.Checkpoint`."""
    opt._create_or_restore_slot_variable(
        slot_variable_position=position, slot_name=name, variable=variable
    )


def replace_initializer(variable: Any, operation: Any) -> None:
    """Let a variable's initialiser, and all that are made of it, be another operation."""
    variable._initializer_op = operation


def inside_old_control_flow(graph: tf.Graph) -> bool:
    """Whether operations are being made in a `tf.cond` or a loop of TensorFlow 1."""
    return graph._get_control_flow_context() is not None


def graph_of(manager: Any) -> tf.Graph:
    """Return the graph of a `SessionManager`."""
    graph: tf.Graph = manager._graph
    return graph


def readiness_of(manager: Any) -> Any:
    """Return what a `SessionManager` asks for the names of what is not initialised; or None."""
    return manager._ready_for_local_init_op


def whole_name(variable: Any) -> str | None:
    """Return the name of the variable that this one is a slice of, or None."""
    info = getattr(variable, "_save_slice_info", None)
    return None if info is None else info.full_name
