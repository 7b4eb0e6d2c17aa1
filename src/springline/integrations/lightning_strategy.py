"""What Lightning's strategy of one device does differently where it is one worker of many."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torch.utils.data import RandomSampler as Shuffled
from torch.utils.data import SequentialSampler as InOrder

from springline.torch.optimizer import CenterOptimizer

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy
else:
    try:
        from lightning.pytorch.strategies import SingleDeviceStrategy
    except ModuleNotFoundError:  # its older name
        from pytorch_lightning.strategies import SingleDeviceStrategy

_log = logging.getLogger("springline")


class OneOfMany(SingleDeviceStrategy):
    """What a strategy of one device does differently as one worker of many."""

    parts: tuple[Part, ...] = ()

    @property
    def is_global_zero(self) -> bool:
        """Rank 0 writes the files."""
        return self.global_rank == 0

    def process_dataloader(self, dataloader: object) -> object:
        """Give the worker its own part of the training data; the others are for all."""
        trainer: Any = self.lightning_module and self.lightning_module.trainer
        wanted = trainer._accelerator_connector.use_distributed_sampler
        if self.world_size == 1 or not (trainer.training and wanted):
            return dataloader
        part = Part.of(dataloader, self.world_size, self.global_rank)
        if part is None or not isinstance(dataloader, DataLoader):
            _log.warning(
                "Every worker sees all of the training data: it is divided only if it is in a "
                "DataLoader, with a length, and has no sampler of your own. Divide it by "
                "`springline.rank()` and pass `Trainer(use_distributed_sampler=False)`."
            )
            return dataloader
        self.parts += (part,)
        divided = copy.copy(dataloader)
        batches = BatchSampler(part, part.batch_size, dataloader.drop_last)
        vars(divided).update(sampler=part, batch_sampler=batches)
        return divided

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Save the center."""
        if (optimizer := center_optimizer(self)) is None:
            return super().lightning_module_state_dict()
        with optimizer.center_weights():
            state = super().lightning_module_state_dict()
            return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Save the worker's own weights with the optimizer: alone it goes on with those."""
        if (wrapped := center_optimizer(self)) is None:
            return super().optimizer_state(optimizer)
        with wrapped.center_weights():
            return super().optimizer_state(optimizer)


class Part(DistributedSampler[Any]):
    """One worker's part of a dataset, which may begin in the middle of an epoch."""

    batch_size = 1
    skip = 0  # batches of the next epoch

    @classmethod
    def of(cls, loader: object, workers: int, rank: int) -> Part | None:
        """Return the part of what a loader loads; None if it does so in its own way."""
        if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
            return None
        its = loader.sampler
        if type(its) is DistributedSampler:
            part = cls(
                its.dataset, its.num_replicas, its.rank, its.shuffle, its.seed, its.drop_last
            )
        elif type(its) is InOrder or (type(its) is Shuffled and not its.replacement):
            part = cls(loader.dataset, workers, rank, shuffle=type(its) is Shuffled)
        else:
            return None
        part.batch_size = loader.batch_sampler.batch_size
        return part

    def __iter__(self) -> Iterator[Any]:
        begin, self.skip = self.skip * self.batch_size, 0
        return itertools.islice(super().__iter__(), begin, None)


def center_optimizer(trainer: Any) -> CenterOptimizer | None:
    """Return the optimizer of a Trainer or its strategy, if it is one of ours."""
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    return optimizer if isinstance(optimizer, CenterOptimizer) else None
