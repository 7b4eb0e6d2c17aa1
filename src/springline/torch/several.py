"""Several torch optimizers as one: Muon for the matrices, AdamW for the rest, one center."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from springline.torch.naming import Group

Closure = Callable[[], float]
State = dict[str, Any]
Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that one is made of: itself, or several."""
    return optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]


class Several(torch.optim.Optimizer):
    """Optimizers that step together, each with its own parameters.

    Its groups are all groups, and its state is that of all, in the form of a single optimizer's.

    Args:
        optimizers: at least one; no parameter is in two of them.
    """

    _made = False  # what torch's constructor sets and adds is not for us

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        seen: set[int] = set()
        for optimizer in self.optimizers:
            _check_closure(optimizer)
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            twice = next((p for p in mine if id(p) in seen), None)
            if twice is not None:
                raise ValueError(
                    f"A parameter of shape {tuple(twice.shape)} is in two of the optimizers. Give "
                    "each parameter to one of them."
                )
            seen |= {id(p) for p in mine}
        super().__init__([torch.nn.Parameter(torch.empty(0))], {})
        self._made = True

    @property
    def param_groups(self) -> list[Group]:
        """All groups, one optimizer's after the other's."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        if self._made:
            raise AttributeError("Set the `param_groups` of each optimizer, not of all at once.")

    @property
    def state(self) -> Any:
        """The state of all parameters, each in its own optimizer."""
        return _States(self.optimizers)

    @state.setter
    def state(self, state: Any) -> None:
        if self._made:
            raise AttributeError("Set the `state` of each optimizer, not of all at once.")

    @property
    def defaults(self) -> State:
        """The defaults that all have, as the first has them."""
        first, *others = [optimizer.defaults for optimizer in self.optimizers]
        return {key: v for key, v in first.items() if all(key in other for other in others)}

    @defaults.setter
    def defaults(self, defaults: State) -> None:
        if self._made:
            raise AttributeError("Set the `defaults` of each optimizer, not of all at once.")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> float: ...

    def step(self, closure: Closure | None = None) -> float | None:
        """Let all take a step; with a closure, after it was called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's own hooks see each one's step

    def add_param_group(self, param_group: Group) -> None:
        """Refuse it: which optimizer it is for is not known."""
        if self._made:
            raise ValueError(
                "A parameter group cannot be added to several optimizers. Give it to one of them "
                "before they are wrapped, with a learning rate of 0 if it is to be trained later."
            )

    def state_dict(self) -> State:
        """Return the state of all, numbered as one optimizer with all groups would."""
        state: State = {"state": {}, "param_groups": []}
        first = 0
        for optimizer in self.optimizers:
            its = optimizer.state_dict()
            state["state"] |= {first + i: v for i, v in its["state"].items()}
            for group in its["param_groups"]:
                state["param_groups"].append(
                    {**group, "params": [first + i for i in group["params"]]}
                )
            first += sum(len(group["params"]) for group in its["param_groups"])
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Load what `state_dict` returned."""
        groups, first = list(state_dict["param_groups"]), 0
        ours, its = ([len(g["params"]) for g in gs] for gs in (self.param_groups, groups))
        if ours != its:
            raise ValueError(
                f"The state has groups of {its} parameters, these optimizers have {ours}. Give "
                "the same optimizers in the same order. Nothing was loaded."
            )
        for optimizer in self.optimizers:
            mine = [groups.pop(0) for _ in optimizer.param_groups]
            count = sum(len(group["params"]) for group in mine)
            inside = range(first, first + count)
            optimizer.load_state_dict(
                {
                    "state": {i - first: v for i, v in state_dict["state"].items() if i in inside},
                    "param_groups": [
                        {**group, "params": [i - first for i in group["params"]]} for group in mine
                    ],
                }
            )
            first += count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizers!r})"


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one mapping."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p)[p]

    def __setitem__(self, p: Tensor, state: Any) -> None:
        self._of(p)[p] = state

    def __delitem__(self, p: Tensor) -> None:
        del self._of(p)[p]

    def __iter__(self) -> Iterator[Tensor]:
        return (p for optimizer in self._optimizers for p in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def _of(self, p: Tensor) -> Any:
        for optimizer in self._optimizers:
            if any(p is mine for group in optimizer.param_groups for mine in group["params"]):
                return optimizer.state
        raise KeyError(p)


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} calls its closure as often as it likes, and cannot be one "
            "of several optimizers. Wrap it alone."
        )
