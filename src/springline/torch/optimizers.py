"""The three optimizers that TensorFlow had. Each wraps any torch optimizer, and is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from springline.rules import AGN, ElasticAverage, ModelAverage, Outer
from springline.rules.fragments import Fragments
from springline.rules.period import Period
from springline.rules.rule import Rule
from springline.torch.naming import Named
from springline.torch.optimizer import CenterOptimizer
from springline.torch.options import Options
from springline.torch.outer import MakeOptimizer, TorchOuter, outer_of
from springline.torch.several import Inner, State, parts

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ElasticAverageOptimizer(CenterOptimizer):
    """Elastic averaging: every few steps worker and center are pulled towards each other.

    Args:
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        moving_rate: α in (0, 1], by default 0.9 / workers as in the authors' own code;
            TensorFlow's default was τ times weaker.
        rho: ρ, the exploration penalty: the loss gains `ρ·½‖x − c̃‖²`, with `c̃` the center as it
            was at the last exchange. It is of all parameters that need a gradient: one without any
            gets `ρ(x − c̃)`, and a sparse gradient gets all rows. 0 costs nothing.
        fragments: into how many parts the model is cut, or lists of their parameters' names (or the
            beginnings of names); one is exchanged every period/fragments steps.
        synchronous: whether all workers wait for each other before the first step.
        **options: those of all optimizers; see `Options`.

    >>> model = torch.nn.Linear(2, 1)
    >>> opt = ElasticAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> opt.step()
    """

    def __init__(
        self,
        optimizer: Inner,
        *,
        model: torch.nn.Module | None = None,
        period: Period = 10,
        moving_rate: float | None = None,
        rho: float = 0.0,
        fragments: Fragments = 1,
        synchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        def rule(workers: int, _: list[Named]) -> Rule:
            return ElasticAverage(
                period=period,
                workers=workers,
                fragments=fragments,
                moving_rate=moving_rate,
                rho=rho,
            )

        super().__init__(
            optimizer,
            rule,
            model=model,
            synchronous=synchronous,
            **options,
        )
        self._rho = rho

    def _observe(self) -> None:
        if self._rho:
            self._pull()

    @torch.no_grad()
    def _pull(self) -> None:
        """`g ← g + ρ(x − c̃)`."""
        for p in self._trained():
            pull = p.detach() - self._copy_of(p)
            if p.grad is None:
                p.grad = (self._rho * pull).to(p.dtype)
            elif p.grad.is_sparse:  # and stays so, for optimizers that take no other
                whole = p.grad.to_dense().add_(pull, alpha=self._rho)
                p.grad = whole.to_sparse(p.grad.sparse_dim())
            else:
                p.grad.add_(pull, alpha=self._rho)

    def _trained(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def _penalty(self) -> float:
        """`ρ·½‖x − c̃‖²`."""
        if not self._rho:
            return 0.0
        pulls = [p - self._copy_of(p) for p in self._trained()]
        return self._rho / 2 * sum(float(pull.square().sum()) for pull in pulls)

    def _copy_of(self, p: Tensor) -> Tensor:
        return self._mirror.tensors[id(p)]

    def _after_exchange(self) -> None:
        self._mirror.up()


class ModelAverageOptimizer(CenterOptimizer):
    """Model averaging: every few steps all workers meet and go on from their mean.

    Args:
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        period: τ, local steps between two rounds of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        fragments: into how many parts the model is cut, or lists of their parameters' names (or the
            beginnings of names); one is exchanged every period/fragments steps.
        **options: those of all optimizers; see `Options`.
    """

    def __init__(
        self,
        optimizer: Inner,
        *,
        model: torch.nn.Module | None = None,
        period: Period = 10,
        fragments: Fragments = 1,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            optimizer,
            lambda workers, _: ModelAverage(period=period, workers=workers, fragments=fragments),
            model=model,
            synchronous=True,
            **options,
        )


class AGNOptimizer(CenterOptimizer):
    """AGN: every few steps the mean gradient takes one step of an outer optimizer on the center.

    By default the outer optimizer is of the same kind and settings as `optimizer` and follows its
    learning rates. Its state is in the center.

    Args:
        optimizer: any torch optimizer, made with the model's parameters; or a list of them.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        outer: the outer optimizer: one of `springline.outer`, with a learning rate of its own, or a
            function that makes a torch optimizer of a list of parameters.
        fragments: into how many parts the model is cut, or lists of their parameters' names (or the
            beginnings of names); one is exchanged every period/fragments steps.
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
        fragments: Fragments = 1,
        synchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._fixed_rate = outer is not None

        def rule(workers: int, named: list[Named]) -> Rule:
            made = self._twin(named) if outer is None else outer_of(outer, named)
            return AGN(
                period=period,
                workers=workers,
                fragments=fragments,
                outer=made,
                fixed_rate=self._fixed_rate,
            )

        # The parameters that had a gradient in the last step and their parts of `a`; the others.
        self._with_gradient: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._without_gradient: list[Tensor] = []

        super().__init__(
            optimizer,
            rule,
            model=model,
            synchronous=synchronous,
            **options,
        )

    def _twin(self, named: list[Named]) -> Outer:
        kinds = [type(optimizer).__name__ for optimizer in parts(self.inner)]
        if len(kinds) > 1:
            raise ValueError(
                f"The center's optimizer cannot be like several ({', '.join(kinds)}). Pass "
                "`outer=`, one for all parameters, as `outer=springline.outer.Adam(1e-3)`."
            )
        return TorchOuter(self.inner, {n.name: n.group for n in named})

    def _observe(self) -> None:
        """`a ← a + g`, in one call where the same parameters have a gradient as the step before."""
        local = self.worker.local
        if self._sums and local.gradients.all():
            gradients: list[Any] = [p.grad for p in self._with_gradient]
            odd = any(g is None or g.requires_grad for g in gradients)
            if not odd and all(p.grad is None for p in self._without_gradient):
                torch._foreach_add_(self._sums, gradients)
                local.gradients += 1
                return
        self._observe_each()

    @torch.no_grad()
    def _observe_each(self) -> None:
        local, sums = self.worker.local, self._mirror.tensors
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._with_gradient = [p for p in parameters if p.grad is not None]
        self._without_gradient = [p for p in parameters if p.grad is None]
        self._sums = [sums[id(p)] for p in self._with_gradient]
        for p, a in zip(self._with_gradient, self._sums, strict=True):
            g: Any = p.grad
            entry = self._entries[id(p)]
            if local.seen[entry]:
                a.add_(g)
            elif g.is_sparse:
                a.zero_().add_(g)
            else:
                a.copy_(g)
            local.seen[entry] = True
        local.gradients += 1

    def _load_worker_state(self, state: State) -> None:
        super()._load_worker_state(state)
        self._sums = []  # the next step looks again

    def _before_exchange(self) -> None:
        self._mirror.down()
        if self._fixed_rate:
            return
        for group in self.param_groups:
            for p in group["params"]:
                self.worker.local.rates[self._entries[id(p)]] = float(group.get("lr", 0.0))
