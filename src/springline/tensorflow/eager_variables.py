"""What eager mode is given: variables, their names and first values, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from springline.tensorflow.getter import Variable
from springline.tensorflow.words import brief

Array = NDArray[Any]
_INSTEAD = {
    "make_session_run_hook": "`minimize` exchanges by itself, and `finish()` makes the last "
    "exchange",
    "swapping_saver": "`save_center(path)` writes the center under the variables' names",
    "get_init_op": "the first `minimize` or `compute_gradients` sets the variables to the center",
}


def no_meaning(method: str) -> RuntimeError:
    """Return the error for a method that graphs have."""
    return RuntimeError(f"In eager mode there is no `{method}`: {_INSTEAD[method]}.")


def check_mode(made_eager: bool) -> None:
    """Refuse an optimizer that was made in eager mode and is used in a graph, or the reverse."""
    if made_eager != tf.compat.v1.executing_eagerly_outside_functions():
        made, used = ("eager mode", "a graph") if made_eager else ("a graph", "eager mode")
        raise RuntimeError(
            f"This optimizer was made in {made} and is used in {used}. Make it where it is used."
        )


def unique_names(variables: Iterable[Variable]) -> dict[str, Variable]:
    """Name variables: in eager mode several may have the same name, and get a number."""
    named: dict[str, Variable] = {}
    for v in variables:
        base = name = v.name.partition(":")[0]
        number = 0
        while name in named:
            number += 1
            name = f"{base}_{number}"
        named[name] = v
    return named


def ref_of(variable: Any) -> Any:
    """Return a variable's reference; refuse what is none."""
    if not isinstance(variable, tf.Variable):
        raise TypeError(
            f"`var_list` must hold tf.Variables, or Keras' variables. Received: {brief(variable)}."
        )
    return variable.ref()


def first_value(variable: Variable) -> Array:
    """Return what a variable is to begin with."""
    if not variable.is_initialized():
        raise ValueError(
            f"{variable.name!r} is made inside the tf.function that trains it, too late to start "
            "from the center. Make the model before, for instance by calling it once."
        )
    value: Array = variable.numpy()
    return value
