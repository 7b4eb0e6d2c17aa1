"""What the optimizers are given: gradients, variables, an optimizer; refused where it is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from springline.run import Run
from springline.tensorflow.trio import Trio, Variable

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


class NotAVariableError(TypeError, ValueError):
    """Documented as a TypeError of `compute_gradients` and as a ValueError of `minimize`."""


def variables(var_list: Any) -> list[Variable]:
    """Return the variables of a list; of a partitioned one its slices.

    Raises:
        NotAVariableError: it has something else.
    """
    given = tf.nest.flatten(var_list)
    parts = (part for v in given for part in (v if hasattr(v, "as_tensor") else [v]))
    return [_variable("var_list", part) for part in parts]


def counter(global_step: Any) -> Variable | None:
    """Return the variable that counts exchanges; refuse anything else but None."""
    return None if global_step is None else _variable("global_step", global_step)


def _variable(argument: str, given: Any) -> Variable:
    variable = plain(given)
    if not isinstance(variable, tf.Variable):
        raise NotAVariableError(
            f"`{argument}` takes tf.Variables and Keras' variables only. Received: {brief(given)}."
        )
    return variable


def graph_loss(loss: Any) -> Any:
    """Return a loss of a graph as a tensor."""
    value = loss() if callable(loss) else loss
    if not tf.is_tensor(value):
        raise ValueError(
            "`loss` must be a tensor, or a callable without arguments that returns one. "
            f"Received: {brief(value)}."
        )
    return value


def scale_of(loss: Any, grad_loss: Any) -> Any:
    """Return the gradient of the loss itself as a tensor."""
    with contextlib.suppress(TypeError, ValueError):
        return tf.convert_to_tensor(grad_loss, loss.dtype)
    raise ValueError(
        "`grad_loss` must be a tensor of the loss's dtype, or a number. "
        f"Received: {brief(grad_loss)}."
    )


def no_meaning(method: str) -> RuntimeError:
    """Return the error for a method that graphs have."""
    return RuntimeError(f"In eager mode there is no `{method}`: {_INSTEAD[method]}.")


def no_checkpoint() -> RuntimeError:
    """Return the error for `tf.train.Checkpoint` in a graph."""
    return RuntimeError(
        "In a graph `tf.train.Checkpoint` does not save an optimizer of springline: the hook's "
        "`MonitoredTrainingSession` does, in its `checkpoint_dir`, and so does `swapping_saver`."
    )


def check_mode(made_eager: bool) -> None:
    """Refuse an optimizer that was made in eager mode and is used in a graph, or the reverse."""
    if made_eager != tf.compat.v1.executing_eagerly_outside_functions():
        made, used = ("eager mode", "a graph") if made_eager else ("a graph", "eager mode")
        raise RuntimeError(
            f"This optimizer was made in {made} and is used in {used}. Make it where it is used."
        )


def check_run(run: Run, num_worker: int) -> None:
    """Refuse, in eager mode, a run of another number of workers, or without a place to meet."""
    if run.workers != num_worker:
        raise ValueError(
            f"`num_worker` is {num_worker}, but this is worker {run.rank} of a run of "
            f"{run.workers}. In eager mode workers are started with `springline run "
            f"--workers {num_worker} SCRIPT`, and `springline.workers()` is their number."
        )
    run.check_meeting()


def variables_of(model: Any) -> list[Variable]:
    """Return all variables of a model of Keras', or of a `tf.Module`."""
    try:
        return variables(list(model.variables))
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"`model` must be a Keras model, or a tf.Module. Received: {brief(model)}."
        ) from error


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


def first_value(variable: Variable) -> Array:
    """Return what a variable is to begin with."""
    if not variable.is_initialized():
        raise ValueError(
            f"{variable.name!r} is made inside the tf.function that trains it, too late to start "
            "from the center. Make the model before, for instance by calling it once."
        )
    value: Array = variable.numpy()
    return value


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
