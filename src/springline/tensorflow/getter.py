"""Custom getters: every trainable variable gets a local copy on the worker and a center on the ps.

They are for `tf.compat.v1.variable_scope(custom_getter=...)` under
`tf.compat.v1.train.replica_device_setter`, which places the centers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, ClassVar

import tensorflow as tf

from springline.tensorflow.living import keep_living
from springline.tensorflow.sessions import note_center
from springline.tensorflow.trio import Trio, Variable, v1

GLOBAL_VARIABLE_NAME = "global_center_variable"
LOCAL_VARIABLE_NAME = "local_center_variable"
GRAD_VARIABLE_NAME = "grad_variable"


class CustomGetter:
    """What the three getters have in common.

    Args:
        worker_device: the device of this worker's variables, such as `/job:worker/task:0`.
    """

    beside: ClassVar[str | None] = None  # the name of what the rule keeps per variable

    def __init__(self, worker_device: str) -> None:
        """Make a getter; the class has what the arguments mean."""
        if not isinstance(worker_device, str):
            raise TypeError(
                "`worker_device` must be a string such as '/job:worker/task:0'. "
                f"Received: {worker_device!r}."
            )
        self.worker_device = worker_device
        self._trios: dict[Any, Trio] = {}  # by the local variable
        self._kept: set[Any] = set()  # centers that initialisers leave alone

    def __call__(
        self,
        getter: Callable[..., Variable],
        name: str,
        trainable: bool | None,
        collections: Iterable[str] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Variable:
        """Make (or find again) a variable; a trainable one with its center."""
        if not _is_trainable(trainable, kwargs.get("synchronization")):
            return getter(name, *args, trainable=trainable, collections=collections, **kwargs)
        keys = v1.GraphKeys
        given = [key for key in collections or () if key != keys.GLOBAL_VARIABLES]
        with v1.device(self.worker_device):
            local = getter(
                name,
                *args,
                trainable=True,
                collections=[*given, keys.LOCAL_VARIABLES],
                **kwargs,
            )
        plain = {**kwargs, "regularizer": None, "trainable": False}  # a loss counts once
        center = getter(
            f"{GLOBAL_VARIABLE_NAME}/{name}",
            *args,
            collections=[keys.GLOBAL_VARIABLES],
            **plain,
        )
        self._keep_living(center)
        beside = None
        if self.beside:
            like = {"constraint": None, **_zeros(local)}
            with v1.device(self.worker_device):
                beside = getter(
                    f"{self.beside}/{name}",
                    *args,
                    collections=[keys.LOCAL_VARIABLES],
                    **plain | like,
                )
        for trio in zip(*map(_slices, (local, center, beside)), strict=False):
            self._trios[trio[0].ref()] = Trio(*trio)
        return local

    def _keep_living(self, center: Variable) -> None:
        """Protect a new center, and the global step, before an initialiser is made of them."""
        if v1.executing_eagerly_outside_functions():
            return
        step = v1.train.get_global_step()
        for c in _slices(center):
            if c.ref() not in self._kept:  # it may be used again
                note_center(c, self.worker_device)
        found = [*_slices(center), *([] if step is None else [step])]
        keep_living([v for v in found if v.ref() not in self._kept], self.worker_device)
        self._kept.update(v.ref() for v in found)

    def trio(self, variable: Variable) -> Trio:
        """Return what belongs to a variable of the worker."""
        trio = self._trios.get(variable.ref())
        if trio is None:
            raise ValueError(
                f"{variable.name!r} was not made through this getter, so it has no center. Make "
                "it with `tf.compat.v1.get_variable` inside `variable_scope(..., "
                f"custom_getter=getter)`, where `getter` is the same instance of "
                f"{type(self).__name__} that the optimizer is given, or leave it out of `var_list`."
            )
        return trio

    def has(self, variable: Variable) -> bool:
        """Whether a variable was made here."""
        return variable.ref() in self._trios

    def trios(self) -> list[Trio]:
        """Return all of the current graph, in the order they were made."""
        graph = v1.get_default_graph()
        return [trio for trio in self._trios.values() if trio.local.graph is graph]


class Map(Mapping[Variable, Variable]):
    """From each variable of the worker to its center, or to what is beside it.

    TensorFlow 1's getters had such dictionaries, and programs read them. Variables of TensorFlow 2
    cannot be keys of one.
    """

    def __init__(self, trios: Mapping[Any, Trio], part: str) -> None:
        self._trios = trios
        self._part = part

    def __getitem__(self, variable: Variable) -> Variable:
        return getattr(self._trios[variable.ref()], self._part)

    def __iter__(self) -> Iterator[Variable]:
        return (trio.local for trio in self._trios.values())

    def __len__(self) -> int:
        return len(self._trios)


class ElasticAverageCustomGetter(CustomGetter):
    """For `ElasticAverageOptimizer`: beside each variable its worker's last copy of the center."""

    beside = LOCAL_VARIABLE_NAME

    def __init__(self, worker_device: str) -> None:
        """Make a getter; the class has what the arguments mean."""
        super().__init__(worker_device)
        self._global_map = Map(self._trios, "center")
        self._local_map = Map(self._trios, "beside")


class ModelAverageCustomGetter(CustomGetter):
    """For `ModelAverageOptimizer`."""

    def __init__(self, worker_device: str) -> None:
        """Make a getter; the class has what the arguments mean."""
        super().__init__(worker_device)
        self._local_2_global = Map(self._trios, "center")


class AGNCustomGetter(CustomGetter):
    """For `AGNOptimizer`: beside each variable its accumulated gradient."""

    beside = GRAD_VARIABLE_NAME

    def __init__(self, worker_device: str) -> None:
        """Make a getter; the class has what the arguments mean."""
        super().__init__(worker_device)
        self._global_map = Map(self._trios, "center")
        self._grad_map = self._local_map = Map(self._trios, "beside")


def _zeros(variable: Variable) -> dict[str, Any]:
    """Return the arguments for a variable of zeros, like another."""
    dtype = variable.dtype.base_dtype
    if variable.shape.is_fully_defined():
        return {"shape": variable.shape, "dtype": dtype, "initializer": v1.zeros_initializer()}
    return {"shape": None, "dtype": dtype, "initializer": tf.zeros_like(variable.initial_value)}


def _is_trainable(trainable: bool | None, synchronization: Any) -> bool:
    if trainable is None:
        return bool(synchronization != tf.VariableSynchronization.ON_READ)
    return trainable


def _slices(variable: Variable | None) -> Iterable[Any]:
    """Return the slices of a partitioned variable, or the variable itself."""
    if variable is None:
        return repeat(None)
    return [variable] if isinstance(variable, tf.Variable) else list(variable)
