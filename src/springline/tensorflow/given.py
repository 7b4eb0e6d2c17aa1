"""What the optimizers are given: gradients, variables, an optimizer; refused where it is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from springline.rules import SGD, Adagrad, Adam, Momentum, Outer
from springline.tensorflow.getter import Trio, Variable, v1

Array = NDArray[Any]
GradsAndVars = Iterable[tuple[Any, Variable]]
_MOST = 3  # elements of a list
_LONGEST = 80  # characters of anything
_INSTEAD = {
    "make_session_run_hook": "`minimize` exchanges by itself, and `finish()` makes the last "
    "exchange",
    "swapping_saver": "`save_center(path)` writes the center under the variables' names",
    "get_init_op": "the first `minimize` or `compute_gradients` sets the variables to the center",
}


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


def rate_of(opt: Any) -> Any:
    """Return the learning rate of one of the optimizers below, as it is now."""
    rate = opt._lr if isinstance(opt, v1.train.AdamOptimizer) else opt._learning_rate
    return rate() if callable(rate) else rate


def outer_like(opt: Any) -> Outer:
    """Return an optimizer for the center, of the same kind and settings."""
    make = _OUTERS.get(type(opt))
    if make is None or getattr(opt, "_use_nesterov", False):
        kind = type(opt).__name__ + (" with `use_nesterov`" if make else "")
        names = ", ".join(known.__name__ for known in _OUTERS)
        raise ValueError(
            f"In eager mode AGN has no optimizer like {kind} for the center. Use one of {names} "
            "(without `use_nesterov`), or another rule."
        )
    return make(opt)


_OUTERS: dict[type, Callable[[Any], Outer]] = {
    v1.train.GradientDescentOptimizer: lambda opt: SGD(_number(rate_of(opt))),
    v1.train.MomentumOptimizer: lambda opt: Momentum(_number(rate_of(opt)), _number(opt._momentum)),
    v1.train.AdagradOptimizer: lambda opt: Adagrad(
        _number(rate_of(opt)), _number(opt._initial_accumulator_value)
    ),
    v1.train.AdamOptimizer: lambda opt: Adam(
        _number(rate_of(opt)), _number(opt._beta1), _number(opt._beta2), _number(opt._epsilon)
    ),
}


def _number(value: Any) -> float:
    return float(value() if callable(value) else value)


def brief(value: Any) -> str:
    """Describe a value in a few words: of what holds numbers, its kind, name, shape and dtype.

    >>> brief([(np.zeros((200, 2)), "x")])
    "[(ndarray of shape (200, 2) and dtype float64, 'x')]"
    """
    if isinstance(value, tf.IndexedSlices):
        return f"IndexedSlices of {brief(value.values)}"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        name = _name(value)
        dtype = getattr(value.dtype, "name", value.dtype)
        return f"{type(value).__name__}{name} of shape {value.shape} and dtype {dtype}"
    if isinstance(value, list | tuple):
        parts = [brief(part) for part in value[:_MOST]]
        parts += ["…"] if len(value) > _MOST else []
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(parts)}{right}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _name(value: Any) -> str:
    """Return a variable's or a graph tensor's name in quotes; eager tensors have none."""
    try:
        name = value.name
    except AttributeError:
        return ""
    return f" {name!r}" if isinstance(name, str) else ""
