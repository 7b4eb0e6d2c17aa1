"""AGN's optimizer of the center, and what its state is called.

Each center has an optimizer of its own, a twin of the worker's: so its whole state is beside it on
its server and is named after it, `global_center_variable/w/Adam`. A checkpoint then fits any number
of servers, any scope, with a lock or without.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from springline.rules import SGD, Adagrad, Adam, Momentum, Outer
from springline.tensorflow.private import prepare_once, settings_of
from springline.tensorflow.trio import Variable, v1

Tensor = Any


class OuterOptimizer:
    """A twin of the worker's optimizer for each center.

    Args:
        opt: the worker's optimizer.
        use_locking: whether each update of a variable is made under TensorFlow's lock of it.
        name: of the optimizer that has it.
    """

    def __init__(self, opt: Any, use_locking: bool, name: str) -> None:
        self._opt = opt
        self._name = name
        self._locking = use_locking
        self._prepared = opt
        self._fed: dict[Any, Tensor] = {}  # by placeholder, what the step computes
        self._twins: dict[Any, tuple[Variable, Any]] = {}  # by the center's reference

    def prepare(self) -> None:
        """Compute the rates for what is built next, as a part of the worker's step."""
        self._prepared = _twin(self._opt, self._locking)
        with tf.control_dependencies(None):
            _prepare(self._prepared)

    @contextmanager
    def fed(self) -> Iterator[dict[Any, Tensor]]:
        """Whatever is built here takes the rates from placeholders.

        Yields:
            by placeholder, the tensor that the step computes. Feeding that tensor itself would not
            do: TensorFlow may still run what it depends on.
        """
        prepared, self._prepared = self._prepared, _twin(self._prepared, self._locking)
        rates: dict[Any, tuple[Tensor, Tensor]] = {}
        _replace(self._prepared, rates)
        self._fed = {placeholder.ref(): tensor for placeholder, tensor in rates.values()}
        yield dict(rates.values())
        self._prepared, self._fed = prepared, {}

    def step(self, gradients: Sequence[Tensor], centers: Sequence[Variable]) -> list[Any]:
        """Return operations that take one step of each center."""
        return [self._step(g, c) for g, c in zip(gradients, centers, strict=True)]

    def _step(self, gradient: Tensor, center: Variable) -> Any:
        if center.ref() not in self._twins:
            self._twins[center.ref()] = center, _twin(self._prepared, self._locking)
        _, twin = self._twins[center.ref()]
        _give_rates(self._prepared, twin)
        with _named_after(center, self._fed):
            return twin.apply_gradients([(gradient, center)])

    def variables(self) -> list[Variable]:
        """Return all its state."""
        return [v for _, twin in self._twins.values() for v in twin.variables()]

    def slots(self) -> list[Variable]:
        """Return that part of its state that has the shape of a center, such as moments."""
        return [
            twin.get_slot(center, name)
            for center, twin in self._twins.values()
            for name in twin.get_slot_names()
        ]

    def older_names(self, name: str, keys: Collection[str]) -> list[str]:
        """Return what an older checkpoint calls a variable of this state.

        A slot's name began with the variable scope that it was made in. Of other variables it had
        one for each server, with equal values, named after scopes and locks, such as
        `tower/AGNOptimizer/critical_section_execute_1/beta1_power`.
        """
        if any(name == slot.op.name for slot in self.slots()):
            return [key for key in keys if key.endswith(f"/{name}")]
        last = re.escape(name.rpartition("/")[2].replace("decay", "beta"))
        scope = rf"({re.escape(self._name)}|critical_section_execute)(_\d+)?"
        older = re.compile(rf"(.+/)?{scope}/{last}(_\d+)?")
        return [*filter(older.fullmatch, keys)]


def _newer(name: str) -> str:
    """Name Adam's powers otherwise: programs take a global variable with "beta" for a worker's."""
    return name.replace("beta", "decay")


def outer_like(opt: Any) -> Outer:
    """Return an optimizer for a center of springline's own, of the same kind and settings."""
    settings = settings_of(opt)
    if settings is None:
        kind = type(opt).__name__ + (" with `use_nesterov`" if type(opt) in _OUTERS else "")
        names = ", ".join(known.__name__ for known in _OUTERS)
        raise ValueError(
            f"In eager mode AGN has no optimizer like {kind} for the center. Use one of {names} "
            "(without `use_nesterov`), or another rule."
        )
    return _OUTERS[type(opt)](*settings)


_OUTERS: dict[type, Callable[..., Outer]] = {
    v1.train.GradientDescentOptimizer: SGD,
    v1.train.MomentumOptimizer: Momentum,
    v1.train.AdagradOptimizer: Adagrad,
    v1.train.AdamOptimizer: Adam,
}


@contextmanager
def _named_after(center: Variable, fed: dict[Any, Tensor]) -> Iterator[None]:
    """Whatever is made here is named after a center, whatever scope this is in.

    What starts from a placeholder (Adam's powers, if β is a tensor) starts from the step's tensor.
    """
    base = center.op.name

    def named(next_creator: Any, **kwargs: Any) -> Variable:
        name = kwargs.pop("name")
        start = kwargs.get("initial_value")
        if isinstance(start, tf.Tensor):
            kwargs["initial_value"] = fed.get(start.ref(), start)
        _, within, slot = name.rpartition(f"{base}/")  # a slot is named so, inside the scope
        with v1.name_scope(None):
            return next_creator(name=f"{base}/{slot if within else _newer(name)}", **kwargs)

    with v1.variable_creator_scope(named):
        yield


def _twin(opt: Any, use_locking: bool) -> Any:
    """Return an optimizer of the same kind and settings, without any state.

    What scales a loss has nothing to do with the center: there it is the optimizer inside.
    """
    inside = {k: v for k, v in vars(opt).items() if isinstance(v, v1.train.Optimizer)}
    if isinstance(opt, v1.mixed_precision.MixedPrecisionLossScaleOptimizer):
        (wrapped,) = inside.values()
        return _twin(wrapped, use_locking)
    twin = copy.copy(opt)
    v1.train.Optimizer.__init__(twin, use_locking, opt.get_name())
    for name, wrapped in inside.items():
        setattr(twin, name, _twin(wrapped, use_locking))
    return twin


def _prepare(twin: Any) -> None:
    """Let an optimizer, and what it wraps, compute its rates now and not again."""
    prepare_once(twin)
    for inside in vars(twin).values():
        if isinstance(inside, v1.train.Optimizer):
            _prepare(inside)


def _replace(twin: Any, rates: dict[Any, tuple[Tensor, Tensor]]) -> None:
    """Replace an optimizer's tensors that may change from step to step by placeholders."""
    for name, value in vars(twin).items():
        if isinstance(value, v1.train.Optimizer):
            _replace(value, rates)
        elif isinstance(value, tf.Tensor) and (value.op.type != "Const" or value.op.control_inputs):
            if value.ref() not in rates:
                rates[value.ref()] = v1.placeholder(value.dtype, value.shape), value
            setattr(twin, name, rates[value.ref()][0])


def _give_rates(prepared: Any, twin: Any) -> None:
    """Let an optimizer have the tensors of another of its kind."""
    for name, value in vars(prepared).items():
        if isinstance(value, v1.train.Optimizer):
            _give_rates(value, getattr(twin, name))
        elif isinstance(value, tf.Tensor):
            setattr(twin, name, value)
