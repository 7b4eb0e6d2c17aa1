"""A model's weights, as a worker's center knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Variables = dict[str, Any]  # Keras' own, by name


class Weights:
    """The weights of a model that is built.

    Args:
        model: a Keras model.

    Attributes:
        trained: what the optimizer trains.
        statistics: floating-point weights that layers update themselves, as BatchNorm does.
        others: frozen weights, counters; no worker changes them, and they are not in the center.
    """

    def __init__(self, model: Any) -> None:
        named = _named(model)
        trained = {id(v) for v in model.trainable_variables}
        updated = {
            id(v)
            for layer in model._flatten_layers()
            if layer.trainable
            for v in layer._non_trainable_variables
            if keras.backend.is_float_dtype(v.dtype)
        }
        self.trained = {name: v for name, v in named.items() if id(v) in trained}
        self.statistics = {name: v for name, v in named.items() if id(v) in updated}
        self.others = {n: v for n, v in named.items() if id(v) not in trained | updated}
        if not self.trained:
            raise ValueError(
                f"The model {model.name!r} has no weights to train. If it is not built yet, give "
                "it an `Input`, or call it on a batch, before `fit`."
            )

    def read(self, parameters: Any, buffers: Any) -> None:
        """Copy the weights into a worker's arrays."""
        for variables, arrays in ((self.trained, parameters), (self.statistics, buffers)):
            for name, v in variables.items():
                np.copyto(arrays[name], to_numpy(v))

    def write(self, values: Mapping[str, Array]) -> None:
        """Assign values by name: copies, for a backend may keep the memory that it is given."""
        for name, v in (self.trained | self.statistics).items():
            v.assign(np.array(values[name]))


def arrays(variables: Variables) -> dict[str, Array]:
    """Return the variables' values."""
    return {name: to_numpy(v) for name, v in variables.items()}


def to_numpy(variable: Any) -> Array:
    """Return a variable's values, in the center's dtype if they are floating-point numbers."""
    values = np.asarray(keras.ops.convert_to_numpy(variable))
    if keras.backend.is_float_dtype(variable.dtype) and values.dtype != np.float64:
        return values.astype(np.float32, copy=False)
    return values


def _named(model: Any) -> Variables:
    named: Variables = {}
    for v in model.weights:
        name, number = v.path, 1
        while name in named:  # a layer of one's own may use a name twice
            number += 1
            name = f"{v.path}_{number}"
        named[name] = v
    return named
