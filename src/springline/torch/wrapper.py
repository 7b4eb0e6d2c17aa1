"""A torch optimizer around another: everything that torch itself expects of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, overload

import torch

from springline.torch.naming import Group
from springline.torch.several import Closure, Inner, Several, State


class Wrapper(torch.optim.Optimizer):
    """An optimizer that has its groups, state and defaults from the one that it wraps.

    Schedulers, `GradScaler` and the user read and write them here or there: they are the same.
    """

    _wraps = False  # what torch's constructor sets and adds is not for us

    def __init__(self, optimizer: Inner) -> None:
        given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        for one in given:
            _check(one)
        if not given:
            raise ValueError("The list of optimizers is empty. Give at least one.")
        self.inner = given[0] if len(given) == 1 else Several(given)
        super().__init__([torch.nn.Parameter(torch.empty(0))], {})
        self._wraps = True

    def __getattr__(self, name: str) -> Any:
        """Look for what we do not have in the inner optimizer; private names are not forwarded."""
        if hasattr(type(self), name):  # a property of ours has failed: that is its error
            return object.__getattribute__(self, name)
        if not name.startswith("_") and "inner" in self.__dict__ and hasattr(self.inner, name):
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @abstractmethod
    def _step(self, closure: Closure | None) -> float | None:
        """Take a step."""

    @abstractmethod
    def _save(self) -> State:
        """Return the state."""

    @abstractmethod
    def _load(self, state: State) -> None:
        """Go back to a state."""

    @abstractmethod
    def _add(self, group: Group) -> None:
        """Add a parameter group."""

    @property
    def param_groups(self) -> list[Group]:
        """The inner optimizer's parameter groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        if self._wraps:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._wraps:
            self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._wraps:
            self.inner.defaults = defaults

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> float: ...

    def step(self, closure: Closure | None = None) -> float | None:
        """Take a local step; exchange with the center if it is due."""
        if self._optimizer_step_pre_hooks:
            closure = self._before_step(closure)
        loss = self._step(closure)
        if self._optimizer_step_post_hooks:
            for hook in tuple(self._optimizer_step_post_hooks.values()):
                hook(self, self._arguments(closure), {})
        return loss

    # Torch would wrap `step` once more, for its profiler and its global hooks, both of which see
    # the inner optimizer's step already; it would cost as much as a small model's step.
    step.hooked = True  # type: ignore[attr-defined]

    def _before_step(self, closure: Closure | None) -> Closure | None:
        args: tuple[Any, ...] = self._arguments(closure)
        kwargs: dict[str, Any] = {}
        for hook in tuple(self._optimizer_step_pre_hooks.values()):
            args, kwargs = hook(self, args, kwargs) or (args, kwargs)
        found: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
        return found

    def _arguments(self, closure: Closure | None) -> tuple[Any, ...]:
        """Return what torch shows the hooks of a step."""
        return (self,) if closure is None else (self, closure)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group. Other workers' center must have its parameters already."""
        if self._wraps:
            self._add(param_group)

    def state_dict(self) -> State:
        """Return the inner optimizer's state and, under "springline", the worker's."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._save()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def __getstate__(self) -> State:
        """Refuse to be copied or pickled: torch's own way would leave half of it behind."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it holds the memory of its model "
            "and is a worker of its center. Save its `state_dict()`, and load that into one that "
            "is made for the other model."
        )

    def load_state_dict(self, state_dict: State) -> None:
        """Load what `state_dict` returned, or a plain state of the inner optimizer."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        self._load(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "The first argument must be a torch.optim.Optimizer, made with the model's parameters, "
            f"or a list of them. Received: {type(optimizer).__name__}."
        )
    if isinstance(optimizer, Wrapper):
        raise TypeError(
            f"This {type(optimizer).__name__} is wrapped already, and exchanges with its center. "
            "Give the torch optimizer inside it, `.inner`, or use it as it is."
        )
