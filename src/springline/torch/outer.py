"""AGN's outer optimizer, like the inner one: the same kind and settings, its state in the center.

A torch optimizer makes its state in its first step, in whatever way it likes. So does the outer
one: the first step of a parameter is taken without state, what comes out is put into the center,
and every later step works on the center's own arrays.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from springline.rules.outer import Shape, State

_STEPS = "steps"  # steps that the center's parameter has made; 0 means that there is no state
_NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr", "swa_lr", "max_lr", "min_lr")


class TorchOuter:
    """The twin of a torch optimizer.

    Args:
        inner: the optimizer to be like; it is not changed.
        groups: the settings of each parameter, by name.
    """

    elementwise = False  # torch optimizers see whole parameters in their own shape

    def __init__(self, inner: torch.optim.Optimizer, groups: Mapping[str, dict[str, Any]]) -> None:
        self._inner = inner
        self._groups = {
            name: {k: v for k, v in group.items() if k not in _NOT_SETTINGS}
            for name, group in groups.items()
        }
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self.learning_rate = float(inner.defaults.get("lr", 0.0))

    def settings(self) -> dict[str, Any]:
        """Return the kind, and each parameter's settings where they differ from the first's."""
        plain = {n: json.loads(json.dumps(g, default=str)) for n, g in self._groups.items()}
        first: dict[str, Any] = next(iter(plain.values()), {})
        others = {name: group for name, group in plain.items() if group != first}
        return {"kind": type(self._inner).__name__, **first} | (
            {"groups": others} if others else {}
        )

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Take a step on a parameter of zeros and look what state it leaves."""
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.zeros(shape)
        optimizer = self._make(name, p)
        optimizer.step()
        shapes: dict[str, tuple[Shape, float]] = {_STEPS: ((1,), 0.0)}
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor | int | float):
                shapes[key] = (tuple(torch.as_tensor(value).shape), 0.0)
            elif value is not None:
                raise ValueError(
                    f"{type(self._inner).__name__} keeps {key!r} as {type(value).__name__}, which "
                    "a center cannot hold. Use another optimizer with AGN."
                )
        return shapes

    def advance(self, state: State) -> None:
        """Torch optimizers count for themselves."""

    def step(
        self,
        name: str,
        c: NDArray[Any],
        g: NDArray[Any],
        state: State,
        rate: float,
        work: NDArray[Any],
    ) -> None:
        """Take one step on `c`, in place."""
        np.square(g, out=work)  # raises where a second moment would overflow
        optimizer = self._optimizers.get(c.ctypes.data)
        if optimizer is None:
            p = torch.nn.Parameter(torch.from_numpy(c))
            optimizer = self._optimizers[c.ctypes.data] = self._make(name, p)
        group = optimizer.param_groups[0]
        p = group["params"][0]
        group["lr"] = rate
        p.grad = torch.from_numpy(g)
        arrays = {key: torch.from_numpy(array) for key, array in state.items() if key != _STEPS}
        optimizer.state.pop(p, None)
        if state[_STEPS][0]:
            optimizer.state[p] = dict(arrays)
        optimizer.step()
        for key, array in arrays.items():
            now = optimizer.state[p][key]
            if now is not array:
                array.copy_(torch.as_tensor(now))
        state[_STEPS][0] += 1

    def _make(self, name: str, p: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Return an optimizer like the inner one, whatever its constructor takes, for `p` alone."""
        made = object.__new__(type(self._inner))
        made.__dict__.update(self._inner.__dict__)
        made.__dict__.pop("step", None)  # a scheduler's
        for key, value in made.__dict__.items():
            if key.endswith("_hooks"):
                made.__dict__[key] = type(value)()
        made.state = defaultdict(dict)
        made.param_groups = [{**copy.deepcopy(self._groups[name]), "params": [p], "lr": 0.0}]
        return made
