"""What the three optimizers have in common: an inner optimizer and a worker."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from springline.center import Center, LocalCenter
from springline.center.checkpoint import write_file
from springline.launch import run as runs
from springline.rules.rule import Rule
from springline.torch.binding import (
    Binding,
    allocator,
    clean,
    float_buffers,
    name_parameters,
    to_numpy,
)
from springline.torch.overlap import Overlap
from springline.worker import Worker

Closure = Callable[[], float]
_log = logging.getLogger("springline")


class CenterOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose worker exchanges with a center. Use one of the three subclasses.

    A step:

    1. the rule sees the gradients (elastic averaging adds its penalty, AGN accumulates);
    2. the inner optimizer steps;
    3. every τ steps, the worker exchanges with the center.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make_rule: Callable[[int, dict[str, dict[str, Any]]], Rule],
        *,
        model: torch.nn.Module | None,
        center: Center | str | Path | None,
        use_locking: bool,
        synchronous: bool | None,
        overlap: bool,
        timeout: float | None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "The first argument must be a torch.optim.Optimizer, made with the model's "
                f"parameters. Received: {type(optimizer).__name__}."
            )
        self.inner = optimizer
        super().__init__([torch.nn.Parameter(torch.empty(0))], {})
        run = runs.Run.from_environment()
        parameters = name_parameters(optimizer.param_groups, model)
        buffers = float_buffers(model)
        workers = center.settings["workers"] if isinstance(center, Center) else run.workers
        groups = {name: self._group_of(p) for name, p in parameters.items()}
        self._model = model
        self._swapped = False
        self.worker = Worker(
            {name: to_numpy(p) for name, p in parameters.items()},
            make_rule(workers, groups),
            run.center_directory if center is None else center,
            run.rank,
            buffers={name: to_numpy(b) for name, b in buffers.items()},
            use_locking=use_locking,
            synchronous=synchronous,
            timeout=timeout,
            allocate=allocator([*parameters.values(), *buffers.values()]),
        )
        self.binding = Binding(self.worker, parameters, model)
        self._entries = {id(p): self.worker.layout.index[n] for n, p in parameters.items()}
        self._overlap = Overlap(self.worker, self.binding) if overlap else None
        runs.tell_step(self.worker.start_step)
        _finish_at_exit(self)

    # The inner optimizer's, always: schedulers and GradScaler read and write them here.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if groups:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if state:
            self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if defaults:
            self.inner.defaults = defaults

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> float: ...

    def step(self, closure: Closure | None = None) -> float | None:
        """Take a local step; exchange with the center if it is due."""
        if self._swapped:
            raise RuntimeError(
                "The model holds the center's weights: leave `center_weights` first."
            )
        loss = None
        if closure is None:
            self._observe()
            self.inner.step()
        else:
            loss = self._step_with(closure)
        worker = self.worker
        due = worker.advance()
        runs.tell_step(worker.start_step + worker.local_step)
        if due:
            self._before_exchange()
        if self._overlap:
            self._overlap.step(due)
        elif due:
            self.binding.gather()
            worker.exchange()
            self.binding.scatter()
        for after in tuple(self._optimizer_step_post_hooks.values()):
            after(self, (closure,), {})
        return loss

    # Torch would wrap `step` once more, for its profiler and its global hooks, both of which see
    # the inner optimizer's step already; it would cost as much as a small model's step.
    step.hooked = True  # type: ignore[attr-defined]

    def _observe(self) -> None:
        """Show the rule the gradients; only the rules that look at them need to."""

    def _step_with(self, closure: Closure) -> float:
        def observed() -> float:
            with torch.enable_grad():
                loss = closure()
            self._observe()
            return loss

        return self.inner.step(observed)

    def _before_exchange(self) -> None:
        """Bring along what the rule sends beside the parameters."""

    def wait(self) -> None:
        """Wait for an exchange in the background (`overlap=True`) and fold it in."""
        if self._overlap:
            self._overlap.wait()

    def finish(self) -> None:
        """Exchange what the last period left over, and leave the center."""
        if not self.worker.finished:
            self.wait()
            self._before_exchange()
            self.binding.gather()
            self.worker.finish()
            self.binding.scatter()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, and its parameters to a center of our own."""
        if not hasattr(self, "worker"):
            return  # the placeholder that torch's constructor wants
        self.inner.add_param_group(param_group)
        new = name_parameters(self.inner.param_groups, self._model)
        missing = [name for name in new if name not in self.worker.layout.index]
        if missing:
            self.inner.param_groups.pop()
            raise ValueError(
                f"The center was made without {missing[0]!r}. Give the optimizer all parameter "
                "groups before it is wrapped, with a learning rate of 0 for those that are to "
                "be trained later."
            )

    @contextlib.contextmanager
    def center_weights(self) -> Iterator[None]:
        """Put the center into the model, to evaluate it, and take it out again."""
        self.wait()
        self.binding.gather()
        own = self.worker.local.x.copy()
        self._swapped = True
        try:
            self.worker.center.read(self.worker.local.x)
            self.binding.scatter()
            yield
        finally:
            self.worker.local.x[:] = own
            self.binding.scatter()
            self._swapped = False

    def save_center(self, path: str | Path) -> None:
        """Write the center as safetensors that `model.load_state_dict(load_file(path))` takes.

        What is not in the center (frozen parameters, integer buffers) is the model's own.
        """
        from safetensors.torch import save_file

        values = {n: torch.from_numpy(v) for n, v in self.worker.center.values().items()}
        if self._model is not None:
            centers = {id(p): values[name] for name, p in self.binding.parameters.items()}
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                mine = values.get(clean(name), tensor.detach().cpu())
                # A tied weight stands under each of its names.
                values[clean(name)] = centers.get(id(tensor), mine).clone().contiguous()
        write_file(Path(path), lambda temporary: save_file(values, temporary))

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and, under "springline", the worker's."""
        self.wait()
        return self.inner.state_dict() | {"springline": self._worker_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or a plain state of the inner optimizer."""
        ours = state_dict.get("springline")
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "springline"})
        if ours is not None:
            self._load_worker_state(ours)

    def _worker_state(self) -> dict[str, Any]:
        worker, local = self.worker, self.worker.local
        state: dict[str, Any] = {
            "settings": worker.center.settings,
            "local_step": worker.local_step,
            "exchanged_at": worker.exchanged_at,
            "start_step": worker.start_step,
            "gradients": local.gradients,
            "seen": torch.from_numpy(local.seen.copy()),
        }
        for key in ("a", "copy"):
            buffer = getattr(local, key)
            if buffer is not None:
                state[key] = torch.from_numpy(buffer.copy())
        if isinstance(worker.center, LocalCenter):
            state["center"] = torch.from_numpy(worker.center.dump())
        return state

    def _load_worker_state(self, state: dict[str, Any]) -> None:
        worker, local = self.worker, self.worker.local
        worker.local_step, worker.start_step = state["local_step"], state["start_step"]
        worker.exchanged_at = state["exchanged_at"]
        local.gradients = state["gradients"]
        local.seen[:] = state["seen"].numpy()
        for key in ("a", "copy"):
            buffer = getattr(local, key)
            if buffer is not None and key in state:
                buffer[:] = state[key].numpy()
        if isinstance(worker.center, LocalCenter) and "center" in state:
            worker.center.load(state["center"].numpy())

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        return next(g for g in self.inner.param_groups if any(q is p for q in g["params"]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker.rule}, inner={self.inner!r})"


def _finish_at_exit(optimizer: CenterOptimizer) -> None:
    """Finish when the script ends; after an error only leave, which the process's end does."""
    reference = weakref.ref(optimizer)

    def finish() -> None:
        alive = reference()
        if alive is not None and getattr(sys, "last_value", None) is None:
            try:
                alive.finish()
            except Exception:
                _log.exception("The last exchange failed")

    atexit.register(finish)
