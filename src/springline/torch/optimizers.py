"""The three optimizers. Each wraps any torch optimizer, and is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from springline.center import Center
from springline.rules import AGN, ElasticAverage, ModelAverage
from springline.rules.rule import Rule
from springline.torch.optimizer import CenterOptimizer
from springline.torch.outer import TorchOuter


class ElasticAverageOptimizer(CenterOptimizer):
    """Elastic averaging: every few steps worker and center are pulled towards each other.

    Args:
        optimizer: any torch optimizer, made with the model's parameters.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        communication_period: τ, local steps between two exchanges.
        moving_rate: α in (0, 1], by default 0.9 / workers as in the authors' own code;
            TensorFlow's default was τ times weaker.
        rho: ρ, the exploration penalty; 0 costs nothing.
        use_locking: whether an exchange is atomic, per shard.
        synchronous: whether all workers wait for each other before the first step.
        overlap: exchange in the background; the training loop never waits.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.

    >>> model = torch.nn.Linear(2, 1)
    >>> opt = ElasticAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> opt.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        communication_period: int = 10,
        moving_rate: float | None = None,
        rho: float = 0.0,
        use_locking: bool = True,
        synchronous: bool = False,
        overlap: bool = False,
        center: Center | str | Path | None = None,
        timeout: float | None = None,
    ) -> None:
        def rule(workers: int, _: dict[str, dict[str, Any]]) -> Rule:
            return ElasticAverage(
                period=communication_period, workers=workers, moving_rate=moving_rate, rho=rho
            )

        super().__init__(
            optimizer,
            rule,
            model=model,
            center=center,
            use_locking=use_locking,
            synchronous=synchronous,
            overlap=overlap,
            timeout=timeout,
        )
        self._rho = rho
        copy = self.worker.local.copy
        views = {} if copy is None else self.worker.layout.views(copy)
        self._copies = {
            id(p): torch.from_numpy(views[name])
            for name, p in self.binding.parameters.items()
            if views
        }

    @torch.no_grad()
    def _pull(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    pull = p.detach() - self._copies[id(p)].to(p.device, p.dtype)
                    # A sparse gradient becomes dense: the penalty moves every element.
                    p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    p.grad.add_(pull, alpha=self._rho)

    def _observe(self) -> None:
        if self._rho:
            self._pull()


class ModelAverageOptimizer(CenterOptimizer):
    """Model averaging: every few steps all workers meet and go on from their mean.

    Args:
        optimizer: any torch optimizer, made with the model's parameters.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        interval_steps: τ, local steps between two rounds.
        use_locking: whether a shard is reduced under its lock.
        overlap: meet in the background, until the next round is due.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        interval_steps: int = 100,
        use_locking: bool = True,
        overlap: bool = False,
        center: Center | str | Path | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            lambda workers, _: ModelAverage(period=interval_steps, workers=workers),
            model=model,
            center=center,
            use_locking=use_locking,
            synchronous=True,
            overlap=overlap,
            timeout=timeout,
        )


class AGNOptimizer(CenterOptimizer):
    """AGN: every few steps the mean gradient takes one step of an outer optimizer on the center.

    The outer optimizer is of the same kind and settings as `optimizer`, follows its learning rates,
    and has its state in the center.

    Args:
        optimizer: any torch optimizer, made with the model's parameters.
        model: the model; gives parameters their names, and lets its floating-point buffers travel
            with the center.
        communication_period: τ, local steps between two exchanges.
        use_locking: whether an exchange is atomic, per shard.
        synchronous: whether all workers wait for each other before the first step.
        overlap: exchange in the background; the training loop never waits.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        communication_period: int = 10,
        use_locking: bool = True,
        synchronous: bool = False,
        overlap: bool = False,
        center: Center | str | Path | None = None,
        timeout: float | None = None,
    ) -> None:
        def rule(workers: int, groups: dict[str, dict[str, Any]]) -> Rule:
            outer = TorchOuter(optimizer, groups)
            return AGN(period=communication_period, workers=workers, optimizer=outer)

        super().__init__(
            optimizer,
            rule,
            model=model,
            center=center,
            use_locking=use_locking,
            synchronous=synchronous,
            overlap=overlap,
            timeout=timeout,
        )
        buffer = self.worker.local.a
        views = {} if buffer is None else self.worker.layout.views(buffer)
        self._sums = {  # where the gradients of a parameter are added up: on its own device
            id(p): torch.from_numpy(views[name]).to(p.device)
            for name, p in self.binding.parameters.items()
        }
        self._flat = {id(p): torch.from_numpy(views[n]) for n, p in self.binding.parameters.items()}

    @torch.no_grad()
    def _observe(self) -> None:
        local = self.worker.local
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                a, entry = self._sums[id(p)], self._entries[id(p)]
                seen = bool(local.seen[entry])
                local.seen[entry] = True
                if p.grad.is_sparse:
                    (a if seen else a.zero_()).add_(p.grad)
                else:
                    sums, gradients = later if seen else fresh
                    sums.append(a)
                    gradients.append(p.grad)
        if fresh[0]:
            torch._foreach_copy_(*fresh)
        if later[0]:
            torch._foreach_add_(*later)
        local.gradients += 1

    def _before_exchange(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.worker.local.rates[self._entries[id(p)]] = float(group["lr"])
                if self._sums[id(p)] is not self._flat[id(p)] and p.device.type != "cpu":
                    self._flat[id(p)].copy_(self._sums[id(p)])
