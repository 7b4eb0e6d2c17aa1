"""What all our optimizers have in common: an inner optimizer and a worker."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from springline import run as runs
from springline import worker_state
from springline.center import Center, LocalCenter, SharedCenter
from springline.center.collective import Collective
from springline.checks import seconds
from springline.progress import finish_all, finish_at_exit, note_loaded, note_optimizer
from springline.rules.rule import Rule
from springline.run_centers import note_center
from springline.torch.binding import Binding, Mirror, allocator, to_numpy
from springline.torch.naming import Group, Named, float_buffers, name_parameters, other_names
from springline.torch.outer import first_state
from springline.torch.reading import CenterReader
from springline.torch.resolve import AnyCenter, check_not_wrapped, resolve, warn_of_replicas
from springline.torch.several import Closure, Inner, State, parts
from springline.worker import MakeCenter, Worker

_log = logging.getLogger("springline")
MakeRule = Callable[[int, list[Named]], Rule]


class CenterOptimizer(CenterReader):
    """A torch optimizer whose worker exchanges with a center. Use one of its subclasses.

    A step:

    1. the rule sees the gradients (elastic averaging adds its penalty, AGN accumulates);
    2. the inner optimizer steps;
    3. every τ steps, the worker exchanges with the center.
    """

    def __init__(
        self,
        optimizer: Inner,
        make_rule: MakeRule,
        *,
        synchronous: bool,
        model: torch.nn.Module | None = None,
        use_locking: bool = True,
        overlap: bool = False,
        center: AnyCenter = None,
        name: str | None = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._model = model
        self._make_rule = make_rule
        self._options: State = {
            "use_locking": use_locking,
            "synchronous": synchronous,
            "timeout": timeout,
            "keep_own_weights": keep_own_weights,
            "overlap": overlap,
        }
        self._process = os.getpid()
        check_not_wrapped(name_parameters(self.param_groups, model))
        self._attach(*resolve(center, runs.Run.from_environment(), name))
        self._write_extras()
        center = self.worker.center
        if isinstance(center, SharedCenter) and "TORCHELASTIC_RUN_ID" in os.environ:
            # Nobody else does; after what comes next.
            atexit.register(center.retire_at_exit, self.worker.rank)
        if not isinstance(center, LocalCenter):
            self._warn_of_no_names()
            atexit.register(self._at_exit)
            note_optimizer(self)

    def _warn_of_no_names(self) -> None:
        """Say once that the saved center will not fit the model, if that is so."""
        named = all("param_names" in group for group in self.param_groups)
        if self._model is None and not named and self.worker.rank == 0:
            _log.warning(
                "`model=` was not given: the center and its file call the parameters by numbers, "
                "such as %r, and have no BatchNorm statistics. Pass the model.",
                next(iter(self.worker.parameters)),
            )

    def _attach(self, run: runs.Run, center: Center | MakeCenter | str | Path | None) -> None:
        """Make the worker and give the model's tensors their places in its flat buffers."""
        self._owns_center = center is None
        named = name_parameters(self.inner.param_groups, self._model)
        parameters = {n.name: n.parameter for n in named}
        buffers = float_buffers(self._model)
        workers = center.settings["workers"] if isinstance(center, Center) else run.workers
        self.worker = Worker(
            {name: to_numpy(p) for name, p in parameters.items()},
            self._make_rule(workers, named),
            center,
            run.rank,
            buffers={name: to_numpy(b) for name, b in buffers.items()},
            allocate=allocator([*parameters.values(), *buffers.values()]),
            other_names=other_names({**parameters, **buffers}, self._model),
            **self._options,
        )
        if isinstance(center, Collective):
            note_center(self.worker, center.directory)
        self.binding = Binding(self.worker, parameters, self._model)
        self.binding.note_rounding()
        self._entries = {id(p): self.worker.layout.index[n] for n, p in parameters.items()}
        local = self.worker.local
        kept = local.base if self.worker.rule.penalizes else local.a  # what a step looks at
        self._mirror = Mirror(self.worker.layout, kept, parameters)
        self.worker.bind(self._gather, self._scatter)
        self.worker.note_start()  # again: half precision rounds

    def _step(self, closure: Closure | None) -> float | None:
        self._check_training("step")
        background = self.worker.background
        if background:
            background.settle()
        if not self.worker.begun and not self._begin() and closure is None:
            return None  # its gradient was made elsewhere
        loss = None
        if closure is None:
            self._observe()
            self.inner.step()
        else:
            loss = self._step_with(closure)
        due = self.worker.advance()
        if background:
            background.step(due)
        elif due:
            self.worker.exchange()
        return loss

    def _begin(self) -> bool:
        """Agree with the center before the first step; whether gradients that are there count."""
        warn_of_replicas(self.binding.parameters.values())
        kept = self.worker.begin()
        self._scatter()
        return kept

    def _step_with(self, closure: Closure) -> float:
        def observed() -> float:
            with torch.enable_grad():
                loss = closure()
            penalty = self._penalty()
            self._observe()
            return loss + penalty if penalty else loss

        return self.inner.step(observed)

    def _gather(self) -> None:
        """Bring what an exchange needs into the worker's buffers."""
        self._before_exchange()
        self.binding.gather()

    def _scatter(self) -> None:
        """Bring what an exchange has changed to where it is used."""
        self.binding.scatter()
        self.binding.note_rounding()
        self._after_exchange()

    # What the rules do differently.

    def _observe(self) -> None:
        """Show the rule the gradients; only the rules that look at them need to."""

    def _penalty(self) -> float:
        """Return what the rule adds to the loss."""
        return 0.0

    def _before_exchange(self) -> None:
        """Bring along what the rule sends beside the parameters."""

    def _after_exchange(self) -> None:
        """Take what the rule keeps beside the parameters."""

    def wait(self) -> None:
        """Wait for an exchange in the background (`overlap=True`) and fold it in.

        With a delay it is folded in when that has passed: only its snapshot is waited for.
        """
        background = self.worker.background
        if background and self.worker.rule.delay:
            background.settle()
        elif background:
            background.wait()

    def take_center(self) -> None:
        """Go on from the center as a restarted worker does, for instance after NaN.

        `x ← c`, and nothing is left of the inner optimizer's state and of what has not been
        exchanged.
        """
        self._check_training("take_center")
        self.worker.take_center()
        for optimizer in parts(self.inner):
            optimizer.state.clear()
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if first := first_state(optimizer, p):
                    optimizer.state[p] = first

    def finish(self) -> None:
        """Exchange what the last period left over, and leave the center.

        After `eval` the model then holds the center as it is by now.
        """
        if self.worker.finished:
            return
        shown = self._own is not None
        if shown:
            self.train()
        atexit.unregister(self._at_exit)
        self.worker.finish()
        self._write_extras()
        if shown:
            self.eval()

    def final(self, timeout: float | None = None) -> bool:
        """Finish, wait for all other workers, and return whether this one is to report.

        Args:
            timeout: seconds after which waiting fails, naming the missing.

        Returns:
            True on one rank, the lowest that has finished: the one that evaluates, with
            `center_weights`, the center of them all.
        """
        seconds(timeout)
        self.finish()
        finish_all()  # another optimizer of this script: its other workers may wait for it
        return self.worker.final(timeout)

    def _at_exit(self) -> None:
        self.worker.for_good = False  # it may have ended early, and be restarted
        finish_at_exit(self.finish, self._process)

    def _add(self, group: Group) -> None:
        self._check_training("add_param_group")
        self.wait()
        self.inner.add_param_group(group)
        try:
            if self._new_parameters():
                self._grow()
        except Exception:
            self.inner.param_groups.pop()
            raise

    def _new_parameters(self) -> list[str]:
        """Return the parameters that the center does not have; refuse them if it is not ours."""
        named = name_parameters(self.inner.param_groups, self._model)
        new = [n.name for n in named if n.name not in self.worker.layout.index]
        if new and not self._owns_center:
            raise ValueError(
                f"The center was made without {new[0]!r}, and it is shared with other workers. "
                "Give the optimizer all parameter groups before it is wrapped, with a learning "
                "rate of 0 for those that are to be trained later."
            )
        return new

    def _grow(self) -> None:
        """Replace worker and center by larger ones that go on where they were."""
        state = self._worker_state()
        old = self.worker
        self._attach(runs.Run(), None)
        self._load_worker_state(state)
        self.worker.exchanges, self.worker.exchange_seconds = old.exchanges, old.exchange_seconds
        self.worker.begun = old.begun

    def _save(self) -> State:
        ours = self._worker_state()
        if self._own is not None:  # what the model saves is the center
            views = self.worker.layout.views(self._own)
            ours["own"] = {name: torch.from_numpy(v.copy()) for name, v in views.items()}
        return self.inner.state_dict() | {"springline": ours}

    def _load(self, state: State) -> None:
        self._check_training("load_state_dict")
        ours = state.pop("springline", None)
        if ours is not None:
            worker_state.check(self.worker, ours)
        if not worker_state.own_center(self.worker):  # the center decides, and the others' steps
            self.inner.load_state_dict(state)
            if ours is None or ours["local_step"]:  # not what a trainer reloads before any step
                note_loaded()
            return
        if self.worker.background:
            self.worker.background.drop()  # it belongs to what is replaced
        self.inner.load_state_dict(state)
        if ours is not None:
            self._load_worker_state(ours)
            if "own" in ours:
                own = self.worker.layout.allocate()
                self.worker.layout.write(own, ours["own"])
                self._show(own)

    def _worker_state(self) -> State:
        self.wait()
        self._mirror.down()
        return worker_state.save(self.worker, lambda array: torch.from_numpy(array.copy()))

    def _load_worker_state(self, state: State) -> None:
        worker_state.load(self.worker, state)
        self._mirror.up()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker.rule}, inner={self.inner!r})"
