"""Initialisers that leave alone what others have initialised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.private import replace_initializer
from springline.tensorflow.shards import after, only_if
from springline.tensorflow.step import is_elsewhere
from springline.tensorflow.trio import Variable, v1


def initialize_new(variables: Sequence[Variable]) -> Any:
    """Return an operation that initialises those variables that are not."""

    def unless_initialized(v: Any) -> Any:
        is_new = ~v1.is_variable_initialized(v)
        known = v.shape.is_fully_defined()  # else any shape will do (`validate_shape=False`)
        return only_if(is_new, lambda: after([v1.assign(v, v.initial_value, validate_shape=known)]))

    return tf.group(*map(unless_initialized, variables))


def keep_living(variables: Sequence[Variable], worker_device: str) -> None:
    """Let initialisers leave variables on the servers alone that are initialised.

    A session that is chief by default, or a script that runs `global_variables_initializer` in
    every worker, would reset the center that others train.
    """
    for v in variables:
        if is_elsewhere(v.device, worker_device):
            with tf.control_dependencies(None), v1.device(v.device):
                replace_initializer(v, initialize_new([v]))
