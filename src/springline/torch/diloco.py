"""DiLoCo and its relatives. Each wraps any torch optimizer, and is one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from springline.checks import is_number
from springline.rules import AsyncDiLoCo, DiLoCo, Outer, SlowMo, SlowMomentum
from springline.rules.diloco import PseudoGradient, Staleness
from springline.rules.fragments import Fragments
from springline.rules.period import Period
from springline.rules.rule import Rule
from springline.torch.naming import Named
from springline.torch.optimizer import CenterOptimizer
from springline.torch.options import Options
from springline.torch.outer import MakeOptimizer, outer_of
from springline.torch.several import Inner, State

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _PseudoGradientOptimizer(CenterOptimizer):
    """What they share: an outer optimizer, to which Δ is the gradient."""

    def __init__(
        self,
        optimizer: Inner,
        kind: type[PseudoGradient],
        outer: Outer | MakeOptimizer | None,
        settings: dict[str, Any],
        **options: Any,
    ) -> None:
        def rule(workers: int, named: list[Named]) -> Rule:
            own: dict[str, Any] = {} if outer is None else {"outer": outer_of(outer, named)}
            return kind(workers=workers, **own, **settings)

        super().__init__(optimizer, rule, **options)


class DiLoCoOptimizer(_PseudoGradientOptimizer):
    """DiLoCo: every few steps an outer optimizer takes a step with how far workers have come.

    ```
    Δ = base − x      c ← outer(c, mean of Δ)      x ← c      base ← c
    ```

    Args:
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        period: τ, local steps between two rounds of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        outer: the outer optimizer: one of `springline.outer`, or a function that makes a torch
            optimizer of a list of parameters. By default Nesterov momentum that fits the period:
            0.7 and 0.5 up to 20 steps, 1.0 and 0.5 below 500, the paper's 0.7 and 0.9 from there.
        fragments: into how many parts the model is cut, or lists of their parameters' names (or the
            beginnings of names); one is exchanged every period/fragments steps.
        delay: steps from making a message to adopting the center; they are made while the exchange
            is under way, and are lost but for what `mixing` keeps.
        mixing: the share of a worker's own way, in [0, 1), that it keeps when it adopts the center.
        **options: those of all optimizers; see `Options`.

    >>> model = torch.nn.Linear(2, 1)
    >>> opt = DiLoCoOptimizer(torch.optim.AdamW(model.parameters()), model=model, period=100)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> opt.step()
    """

    def __init__(
        self,
        optimizer: Inner,
        *,
        model: torch.nn.Module | None = None,
        period: Period = 10,
        outer: Outer | MakeOptimizer | None = None,
        fragments: Fragments = 1,
        delay: int = 0,
        mixing: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            optimizer,
            DiLoCo,
            outer,
            {"period": period, "fragments": fragments, "delay": delay, "mixing": mixing},
            model=model,
            synchronous=True,
            **options,
        )


class AsyncDiLoCoOptimizer(_PseudoGradientOptimizer):
    """Asynchronous DiLoCo: every worker's Δ is a step of its own, without waiting.

    Args:
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        outer: the outer optimizer: one of `springline.outer`, or a function that makes a torch
            optimizer of a list of parameters. By default `DelayedNesterov` over as many pushes as
            there are workers, with 0.7 and 0.5 up to 20 steps, 1.0 and no momentum from there.
        staleness: how a message counts that missed s exchanges of others: "inverse" 1/(s + 1),
            "sqrt" 1/√(s + 1); None for no difference.
        dynamic_steps: whether a slower worker makes fewer steps in a period (DyLU), in proportion
            to its steps per second.
        fragments: into how many parts the model is cut, or lists of their parameters' names (or the
            beginnings of names); one is exchanged every period/fragments steps.
        delay: steps from making a message to adopting the center; they are made while the exchange
            is under way, and are lost but for what `mixing` keeps.
        mixing: the share of a worker's own way, in [0, 1), that it keeps when it adopts the center.
        synchronous: whether all workers wait for each other before the first step.
        **options: those of all optimizers; see `Options`.
    """

    def __init__(
        self,
        optimizer: Inner,
        *,
        model: torch.nn.Module | None = None,
        period: Period = 10,
        outer: Outer | MakeOptimizer | None = None,
        staleness: Staleness | None = None,
        dynamic_steps: bool = False,
        fragments: Fragments = 1,
        delay: int = 0,
        mixing: float = 0.0,
        synchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        settings: dict[str, Any] = {"period": period, "fragments": fragments, "delay": delay}
        settings |= {"mixing": mixing, "staleness": staleness, "dynamic_steps": dynamic_steps}
        super().__init__(
            optimizer,
            AsyncDiLoCo,
            outer,
            settings,
            model=model,
            synchronous=synchronous,
            **options,
        )


class SlowMoOptimizer(_PseudoGradientOptimizer):
    """SlowMo: model averaging with slow momentum, in units of the inner learning rate.

    ```
    u ← βu + mean of Δ/η      c ← c − αηu      x ← c
    ```
    η is the inner optimizer's mean learning rate since the last round.

    Args:
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        period: τ, local steps between two rounds of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        slow_rate: α.
        slow_momentum: β in [0, 1).
        fragments: into how many parts the model is cut; see `DiLoCoOptimizer`.
        **options: those of all optimizers; see `Options`.
    """

    def __init__(
        self,
        optimizer: Inner,
        *,
        model: torch.nn.Module | None = None,
        period: Period = 10,
        slow_rate: float = 1.0,
        slow_momentum: float = 0.5,
        fragments: Fragments = 1,
        **options: Unpack[Options],
    ) -> None:
        if "outer" in options:
            raise TypeError(
                "SlowMo's outer optimizer is its own: pass `slow_rate` and `slow_momentum`. "
                "DiLoCoOptimizer takes any other as `outer`."
            )
        for key, value, top in (
            ("slow_rate", slow_rate, math.inf),
            ("slow_momentum", slow_momentum, 1.0),
        ):
            if not (is_number(value) and 0 <= value < top):
                raise ValueError(
                    f"`{key}` must be a number with 0 <= {key} < {top:g}. "
                    f"Received: {key}={value!r}."
                )
        # By fragment: the step of its last exchange, and of each group's learning rate since then
        # the sum, and of how many steps.
        self._sums: dict[int, tuple[int, list[tuple[float, int]]]] = {}
        super().__init__(
            optimizer,
            SlowMo,
            SlowMomentum(slow_rate, slow_momentum),
            {"period": period, "fragments": fragments},
            model=model,
            synchronous=True,
            **options,
        )

    def _observe(self) -> None:
        """Note the learning rates of a step."""
        for fragment, last in enumerate(self.worker.exchanged_at):
            since, sums = self._sums.get(fragment, (last, []))
            held = sums if since == last else []
            new = len(self.param_groups) - len(held)
            pairs = zip(self.param_groups, held + [(0.0, 0)] * new, strict=False)
            sums = [(a + float(group.get("lr", 0.0)), n + 1) for group, (a, n) in pairs]
            self._sums[fragment] = last, sums

    def _before_exchange(self) -> None:
        worker = self.worker
        if not self._sums:
            return
        _, sums = self._sums[worker.fragment]
        means = [total / steps for total, steps in sums]
        new = [float(group.get("lr", 0.0)) for group in self.param_groups[len(sums) :]]
        for group, rate in zip(self.param_groups, means + new, strict=False):
            for p in group["params"]:
                worker.local.rates[self._entries[id(p)]] = rate

    def _worker_state(self) -> State:
        return super()._worker_state() | {"rates": dict(self._sums)}

    def _load_worker_state(self, state: State) -> None:
        super()._load_worker_state(state)
        self._sums = dict(state["rates"])
