"""What `apply_gradients` is given: gradients and their variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.getter import Trio, Variable
from springline.tensorflow.words import brief

GradsAndVars = Iterable[tuple[Any, Variable]]


def checked(grads_and_vars: GradsAndVars) -> list[tuple[Any, Variable]]:
    """Return the pairs, each gradient a tensor, an IndexedSlices or None.

    Raises:
        TypeError: they are malformed.
    """
    try:
        pairs = [(g, plain(v)) for g, v in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(
            "`grads_and_vars` must be a list of (gradient, variable) pairs, as "
            f"`compute_gradients` returns. Received: {brief(grads_and_vars)}."
        ) from error
    return [(_gradient(g, v), v) for g, v in pairs]


def trained(
    pairs: Sequence[tuple[Any, Variable]], trio: Callable[[Variable], Trio]
) -> list[tuple[Any, Trio]]:
    """Return those that have a gradient, with what belongs to the variable.

    Raises:
        ValueError: none has.
    """
    found = [(g, trio(v)) for g, v in pairs if g is not None]
    if not found:
        raise ValueError(
            "No variable has a gradient: does the loss depend on them? Received: "
            f"{[v.name for _, v in pairs]}."
        )
    return found


def plain(variable: Any) -> Any:
    """Return the variable of TensorFlow's in one of Keras', anything else as it is."""
    if isinstance(variable, tf.Variable):
        return variable
    inside = getattr(variable, "value", None)
    return inside if isinstance(inside, tf.Variable) else variable


def _gradient(g: Any, v: Any) -> Any:
    if not isinstance(v, tf.Variable):
        raise TypeError(
            "`grads_and_vars` must hold (gradient, variable) pairs, a variable being a tf.Variable "
            f"or one of Keras'. Received: variable={brief(v)}."
        )
    if g is None or isinstance(g, tf.IndexedSlices):
        return g
    with contextlib.suppress(TypeError, ValueError):
        return tf.convert_to_tensor(g, v.dtype.base_dtype)
    raise TypeError(
        "`grads_and_vars` must hold (gradient, variable) pairs, a gradient being a tensor of the "
        f"variable's dtype, an IndexedSlices or None. Received: gradient={brief(g)} of {brief(v)}."
    )
