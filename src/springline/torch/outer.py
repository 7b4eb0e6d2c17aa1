"""Torch optimizers as outer optimizers: AGN's, which is like the inner one, or the user's own.

A torch optimizer makes its state in its first step, in whatever way it likes. So does the outer
one: the first step of a parameter is taken without state, what comes out is put into the center,
and every later step works on the center's own arrays.
"""

from __future__ import annotations

import copy
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from springline.rules.outer import Exchange, Outer, Point, Shape
from springline.rules.rule import is_finite, size
from springline.torch.naming import Named

_TAKEN = "steps_taken"  # by the center's parameter; 0 means that there is no state
_NOT_SETTINGS = ("params", "param_names", "lr", "initial_lr", "swa_lr", "max_lr", "min_lr")
# How a step is computed. The center is on the CPU, and its workers need not agree on this.
_COMPUTED = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def outer_of(given: Outer | MakeOptimizer, named: Sequence[Named]) -> Outer:
    """Return the outer optimizer that a user asks for.

    Args:
        given: one of `springline.outer`, or a function that makes a torch optimizer.
        named: the model's parameters.
    """
    if isinstance(given, Outer):
        return given
    kind: Any = given if isinstance(given, type) else type(given)
    if issubclass(kind, Outer | torch.optim.Optimizer):  # a class of ours, or a torch optimizer
        raise TypeError(
            "`outer` must be one of `springline.outer` with its learning rate, as "
            "`outer.Adam(1e-3)`, or a function that makes a torch optimizer of a list of "
            "parameters, as `lambda ps: torch.optim.Adam(ps, lr=1e-3)`. Received: "
            f"{kind.__name__}."
        )
    like = [torch.nn.Parameter(torch.zeros(n.parameter.shape)) for n in named]
    made = given(like) if callable(given) else given
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "`outer` must be one of `springline.outer`, or a function that makes a torch optimizer "
            f"of a list of parameters. Received: {type(made).__name__} {made!r}."
        )
    groups = {id(p): group for group in made.param_groups for p in group["params"]}
    missing = next((n.name for n, p in zip(named, like, strict=True) if id(p) not in groups), None)
    if missing is not None:
        raise ValueError(f"The optimizer that `outer` has made leaves out {missing!r}.")
    return TorchOuter(made, {n.name: groups[id(p)] for n, p in zip(named, like, strict=True)})


class TorchOuter(Outer):
    """The twin of a torch optimizer.

    Args:
        inner: the optimizer to be like; it is not changed.
        groups: the settings of each parameter, by name.

    Attributes:
        rates: the learning rate of each parameter, by name.
    """

    whole = True  # torch optimizers see whole parameters in their own shape

    def __init__(self, inner: torch.optim.Optimizer, groups: Mapping[str, dict[str, Any]]) -> None:
        self._inner = inner
        self._groups = {
            name: {k: v for k, v in group.items() if k not in _NOT_SETTINGS}
            for name, group in groups.items()
        }
        # By thread, name and address: without locks several threads are at one parameter.
        self._optimizers: dict[tuple[int, str, int], torch.optim.Optimizer] = {}
        self._numbers: dict[str, dict[str, type]] = {}  # what of a state is a plain number
        self.learning_rate = float(inner.defaults.get("lr", 0.0))
        self.rates = {name: float(group.get("lr", 0.0)) for name, group in groups.items()}
        self.kind = type(inner).__name__
        plain = type(inner) is torch.optim.SGD  # the only one without state
        self.stateless = plain and not any(g.get("momentum") for g in self._groups.values())

    def rate(self, name: str, number: int) -> float:
        """Return the learning rate of a parameter's group."""
        return self.rates.get(name, 0.0)

    def settings(self) -> dict[str, Any]:
        """Return the kind, the rate, and each parameter's settings where the first's differ."""
        plain = {
            name: json.loads(
                json.dumps({k: v for k, v in group.items() if k not in _COMPUTED}, default=str)
            )
            for name, group in self._groups.items()
        }
        first: dict[str, Any] = next(iter(plain.values()), {})
        others = {name: group for name, group in plain.items() if group != first}
        rates = {*self.rates.values()}
        rate = {"learning_rate": self.rates if len(rates) > 1 else max(rates, default=0.0)}
        return {"kind": self.kind, **rate, **first} | ({"groups": others} if others else {})

    def state(self, name: str, shape: Shape) -> dict[str, tuple[Shape, float]]:
        """Return what the optimizer keeps of a parameter."""
        if self.stateless:
            return {}
        shapes: dict[str, tuple[Shape, float]] = {_TAKEN: ((1,), 0.0)}
        for key, value in self._try(name, shape).items():
            if isinstance(value, Tensor | int | float):
                shapes[key] = (tuple(torch.as_tensor(value).shape), 0.0)
            elif value is not None:
                raise ValueError(
                    f"{self.kind} keeps {key!r} as {type(value).__name__}, which a center cannot "
                    "hold. Use another optimizer, or another rule."
                )
        return shapes

    def _try(self, name: str, shape: Shape) -> dict[str, Any]:
        """Take a step on a parameter of zeros and look what state it leaves."""
        p = torch.nn.Parameter(torch.zeros(shape))
        optimizer = self._make(name, p)
        p.grad = self._gradient(torch.zeros(shape))
        group = optimizer.param_groups[0]
        before = {key: str(value) for key, value in group.items() if key != "params"}
        try:
            optimizer.step()
        except Exception as error:
            raise ValueError(
                f"{self.kind} cannot be an outer optimizer, which takes one step at a time on "
                f"one parameter at a time: {error}. Use another optimizer, or another rule."
            ) from error
        after = {key: str(value) for key, value in group.items() if key != "params"}
        if moved := [key for key, value in after.items() if before.get(key) != value]:
            raise ValueError(
                f"{self.kind} keeps {moved[0]!r} in its groups, not in its state, and a center "
                "cannot hold that. Pass another optimizer as `outer=`, or use another rule."
            )
        state = dict(optimizer.state[p])
        self._numbers[name] = {k: type(v) for k, v in state.items() if isinstance(v, int | float)}
        return state

    def step(self, now: Point, g: NDArray[Any], exchange: Exchange, then: Point) -> None:
        """Take one step, in place on a copy."""
        if size(g) == math.inf:
            np.square(g, out=then.c)  # raises where a second moment would overflow
        np.copyto(then.c, now.c)
        for key, kept in now.state.items():
            np.copyto(then.state[key], kept)
        name = exchange.name
        place = threading.get_ident(), name, then.c.ctypes.data
        optimizer = self._optimizers.get(place)
        if optimizer is None:
            p = torch.nn.Parameter(torch.from_numpy(then.c))
            optimizer = self._optimizers[place] = self._make(name, p)
            if name not in self._numbers:
                self._try(name, then.c.shape)
        group = optimizer.param_groups[0]
        p = group["params"][0]
        group["lr"] = exchange.rate
        p.grad = self._gradient(torch.from_numpy(g))
        state = then.state
        arrays = {key: torch.from_numpy(array) for key, array in state.items() if key != _TAKEN}
        optimizer.state[p] = first_state(self._inner, p)
        if arrays and state[_TAKEN][0]:
            numbers = {key: kind(arrays[key]) for key, kind in self._numbers[name].items()}
            optimizer.state[p] = arrays | numbers
        optimizer.step()
        p.grad = None  # a sparse one is a copy
        if not is_finite(then.c):
            raise FloatingPointError(f"the step of {self.kind} overflows")
        for key, array in arrays.items():
            after = optimizer.state[p][key]
            if after is not array:
                array.copy_(torch.as_tensor(after))
        if _TAKEN in state:
            state[_TAKEN][0] += 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: how the inner optimizer is set, not what it holds."""
        left_out = {"param_groups", "state", "step"}  # a scheduler has put a step of its own there
        inner = {
            key: value
            for key, value in self._inner.__dict__.items()
            if key not in left_out and not key.endswith("_hooks")
        }
        ours = {"_optimizers": {}, "_inner": (type(self._inner), inner)}
        return self.__dict__ | ours

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, inner = state["_inner"]
        made = object.__new__(kind)
        plain = torch.optim.SGD([torch.zeros(0)], lr=0.0).__dict__
        made.__dict__.update({key: value for key, value in plain.items() if key.endswith("_hooks")})
        made.__dict__.update(inner | {"param_groups": [], "state": defaultdict(dict)})
        self.__dict__.update(state | {"_inner": made})

    def _gradient(self, g: Tensor) -> Tensor:
        """Return a gradient as the optimizer takes it: `SparseAdam` takes only sparse ones."""
        return g.to_sparse(1) if isinstance(self._inner, torch.optim.SparseAdam) else g

    def _make(self, name: str, p: torch.nn.Parameter) -> torch.optim.Optimizer:
        """Return an optimizer like the inner one, whatever its constructor takes, for `p` alone."""
        made = object.__new__(type(self._inner))
        made.__dict__.update(self._inner.__dict__)
        made.__dict__.pop("step", None)  # a scheduler's
        for key, value in made.__dict__.items():
            if key.endswith("_hooks"):
                made.__dict__[key] = type(value)()
        group = copy.deepcopy(self._groups[name])
        group |= {key: value for key, value in _COMPUTED.items() if key in group}
        made.param_groups = [{**group, "params": [p], "lr": 0.0}]
        made.state = defaultdict(dict)
        made.state[p] = first_state(self._inner, p)
        return made


def first_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """Return the state of a parameter that was never stepped.

    Only Adagrad has one: it makes it when it is made (and only then, in older versions of torch),
    all others at a parameter's first step.
    """
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    start = optimizer.defaults["initial_accumulator_value"]
    device = p.device if optimizer.defaults.get("fused") else "cpu"
    step = torch.zeros((), device=device)
    return {"step": step, "sum": torch.full_like(p, start, requires_grad=False)}
