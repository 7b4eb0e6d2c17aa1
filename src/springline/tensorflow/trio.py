"""A variable of the worker, and what belongs to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

Variable = Any  # a tf.Variable of graph mode, resource or reference
v1 = tf.compat.v1


class Trio(NamedTuple):
    """A variable of the worker, and what belongs to it. A slice, if it is partitioned."""

    local: Variable  # x
    center: Variable  # c
    beside: Variable  # c̃ or a; None if the rule keeps neither
