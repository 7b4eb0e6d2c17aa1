"""An optimizer around any of Keras', for the rules that need every step's gradients.

It works inside `fit` on all backends, JAX's stateless training included: what it adds to the inner
optimizer's state are variables, which the callback reads and writes where it reads and writes the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras  # type: ignore[import-untyped]
import numpy as np

from springline.errors import SettingsError
from springline.rules import AGN, SGD, Adam, Momentum, Nesterov, Outer
from springline.worker import Worker

_FOR_THE_CENTER = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "amsgrad")


@keras.saving.register_keras_serializable("springline")
class Observed(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Accumulates each gradient, or adds the penalty's, and lets the inner optimizer step.

    Args:
        inner_optimizer: any of `keras.optimizers`, or its name.
        rho: ρ, elastic averaging's penalty: `g ← g + ρ(x − c̃)`. With 0 it accumulates: `a ← a + g`.
        name: as of any of Keras' optimizers.

    Attributes:
        beside: for each variable that is trained, `a`, or `c̃`.
        steps: for each, how many gradients `a` is to be divided by.
        seen: for each, how many it holds.
        pull: ρ while a worker trains, else 0.
    """

    def __init__(self, inner_optimizer: Any, rho: float = 0.0, name: str | None = None) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = keras.optimizers.get(inner_optimizer)
        self.rho = float(rho)
        inner = self.inner_optimizer
        if isinstance(inner, Observed | keras.optimizers.LossScaleOptimizer):
            raise TypeError(
                f"{type(inner).__name__} cannot be inside: make the callback with the optimizer in "
                "it, and put a LossScaleOptimizer around `callback.optimizer`."
            )
        if inner.loss_scale_factor:
            raise SettingsError(
                "`loss_scale_factor` scales the gradients that the center is given. Use a "
                "LossScaleOptimizer around `callback.optimizer`. Received: loss_scale_factor="
                f"{inner.loss_scale_factor!r}."
            )

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables, and those of the inner optimizer."""
        if self.built:
            return
        self.inner_optimizer.build(variables)
        self.beside = [self._like(v) for v in variables]
        self.steps = self.add_variable([len(variables)], dtype="int32", name="steps")
        self.seen = self.add_variable([len(variables)], dtype="int32", name="seen")
        self.pull = self.add_variable([], dtype="float32", name="pull")
        self._places = {id(v): n for n, v in enumerate(variables)}
        super().build(variables)

    def _like(self, v: Any) -> Any:
        """Return a variable of a center's dtype: a sum of many gradients needs it."""
        dtype = "float64" if v.dtype == "float64" else "float32"
        return self.add_variable(v.shape, dtype=dtype, name="beside")

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Take a step."""
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(given)
        self.build(variables)
        places = [self._places[id(v)] for v in variables]
        if self.rho:
            grads = [self._pulled(*one) for one in zip(grads, variables, places, strict=True)]
        else:
            has = np.zeros(len(self.beside), np.int32)
            for n, g in zip(places, grads, strict=True):
                if g is not None:
                    has[n] = 1
                    self.assign_add(self.beside[n], g)
            self.seen.assign_add(has)
            self.steps.assign_add(np.ones_like(has))
        self.inner_optimizer.apply(grads, trainable_variables)

    def _pulled(self, g: Any, v: Any, n: int) -> Any:
        """`g + ρ(x − c̃)`."""
        c = self.beside[n]
        pull = self.pull * (keras.ops.cast(v, c.dtype) - c)
        if g is None:
            return keras.ops.cast(pull, v.dtype)
        g = keras.ops.convert_to_tensor(g)  # of an embedding all rows
        return g + keras.ops.cast(pull, g.dtype)

    # Between these variables and the worker.

    def read(self, worker: Worker, trained: Mapping[str, Any]) -> None:
        """Bring what has accumulated into the worker's buffers."""
        local, index = worker.local, worker.layout.index
        if local.a is None:
            return
        views = worker.layout.views(local.a)
        steps, seen = map(keras.ops.convert_to_numpy, (self.steps, self.seen))
        for name, v in trained.items():
            n, entry = self._places[id(v)], index[name]
            np.copyto(views[name], keras.ops.convert_to_numpy(self.beside[n]))
            local.seen[entry] = seen[n] > 0
            # A loss that is scaled may have left out all steps: then there is nothing to send.
            local.gradients[worker.layout.entries[entry].fragment] = max(1, steps[n])
        if isinstance(worker.rule, AGN) and not worker.rule.fixed_rate:
            worker.set_learning_rate(float(keras.ops.convert_to_numpy(self.learning_rate)))

    def write(self, worker: Worker, trained: Mapping[str, Any]) -> None:
        """Take `c̃` from the worker; forget the gradients that it has sent."""
        local, index = worker.local, worker.layout.index
        self.pull.assign(self.rho)
        if local.base is not None:
            views = worker.layout.views(local.base)
            for name, v in trained.items():
                self.beside[self._places[id(v)]].assign(views[name].copy())
        if local.a is None:
            return
        steps, seen = (np.array(keras.ops.convert_to_numpy(v)) for v in (self.steps, self.seen))
        for name, v in trained.items():
            n, entry = self._places[id(v)], index[name]
            if not local.gradients[worker.layout.entries[entry].fragment]:
                steps[n] = 0
            if not local.seen[entry]:
                seen[n] = 0
                self.beside[n].assign(np.zeros(v.shape, self.beside[n].dtype))
        self.steps.assign(steps)
        self.seen.assign(seen)

    def rest(self) -> None:
        """Be the inner optimizer, until the next worker trains."""
        self.pull.assign(0.0)

    # What the inner optimizer is asked.

    @property
    def variables(self) -> list[Any]:
        """The state of both."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.iterations

    def get_config(self) -> dict[str, Any]:
        """Return what a saved model keeps."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"inner_optimizer": inner, "rho": self.rho, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Observed:
        """Make it of what a saved model has kept."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects)
        return cls(**config | {"inner_optimizer": inner})


def observed_of(model: Any, wanted: Observed | None) -> Observed | None:
    """Return the model's optimizer if a callback needs it; refuse a model that has another.

    Args:
        model: the Keras model, compiled.
        wanted: the callback's `optimizer`; the model may be loaded and have another of its kind.
    """
    found = model.optimizer
    while not isinstance(found, Observed) and hasattr(found, "inner_optimizer"):
        found = found.inner_optimizer
    found = found if isinstance(found, Observed) else None
    if (wanted and wanted.rho) != (found and found.rho):
        mine = "`callback.optimizer`, which this callback reads gradients from"
        raise SettingsError(
            f"Compile the model with {mine if wanted else 'an optimizer of Keras itself'}. "
            f"Received: {_described(model.optimizer if found is None else found)}."
        )
    if found:
        found.build(model.trainable_variables)
    return found


def _described(optimizer: Any) -> str:
    kind = type(optimizer).__name__
    return f"{kind}(rho={optimizer.rho:g})" if isinstance(optimizer, Observed) else kind


def outer_like(optimizer: Any) -> Outer:
    """Return an optimizer for the center, of the same kind and settings as one of Keras'."""
    kind, settings = type(optimizer).__name__, optimizer.get_config()
    more = [name for name in _FOR_THE_CENTER if settings.get(name)]
    rate = float(optimizer.learning_rate)
    if kind == "Adam" and not more:
        return Adam(rate, settings["beta_1"], settings["beta_2"], settings["epsilon"])
    if kind == "SGD" and not more:
        if not settings["momentum"]:
            return SGD(rate)
        return (Nesterov if settings["nesterov"] else Momentum)(rate, settings["momentum"])
    raise SettingsError(
        "By default the center's optimizer is like yours, if that is SGD or Adam without "
        f"{', '.join(_FOR_THE_CENTER)}. Pass `outer=`, one of `springline.outer`, such as "
        f"`springline.outer.Adam(1e-3)`. Received: {kind}"
        f"{' with ' if more else ''}{', '.join(more)}."
    )
