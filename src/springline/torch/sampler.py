"""A sampler that can begin in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from springline import run


class ResumableSampler(DistributedSampler[Any]):
    """Shards a dataset by worker, shuffles it by epoch, and resumes in the middle of an epoch.

    It is torch's `DistributedSampler` with springline's rank and number of workers, and with the
    same order. `springline.epochs` sets its epoch, and where to begin after a restart::

        loader = DataLoader(dataset, 64, sampler=ResumableSampler(dataset))
        for epoch, batches in springline.epochs(loader, 10):
            ...

    Args:
        dataset: with a length, and the same on all workers.
        shuffle: whether each epoch has an order of its own.
        seed: of the order; the same on all workers.
        drop_last: all workers get equally many samples, so that no round waits for one that has
            no step left: by default some samples come twice in an epoch, one per worker at most.
            With `drop_last` as few are left out instead.
        rank: this worker's; by default `springline.rank()`.
        workers: how many there are; by default `springline.workers()`.

    >>> sampler = ResumableSampler(range(5), shuffle=False, rank=1, workers=2)
    >>> list(sampler)  # rank 0 has 0, 2, 4
    [1, 3, 0]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        workers: int | None = None,
    ) -> None:
        rank = run.rank() if rank is None else rank
        workers = run.workers() if workers is None else workers
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"`dataset` must have a length. Received: {type(dataset).__name__}. An "
                "IterableDataset has no sampler: let it yield this worker's part by itself, with "
                "`springline.rank()` and `springline.workers()`."
            )
        if len(dataset) < (workers if drop_last else 1):
            raise ValueError(
                f"`dataset` must have a sample for each of the {workers} workers. Received: "
                f"{len(dataset)} samples, drop_last={drop_last}."
            )
        super().__init__(dataset, workers, rank, shuffle, seed, drop_last)
        self._start = 0  # how many samples the next pass leaves out

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass, which is a whole one."""
        super().set_epoch(epoch)
        self._start = 0

    def skip(self, batches: int, loader: Any) -> bool:
        """Begin the next pass after so many batches of a `DataLoader`; their data is not read.

        Returns:
            False if it cannot: a batch sampler or loader of the user's own may take any number of
            samples.
        """
        sampler = getattr(loader, "batch_sampler", self)
        if sampler is not None and type(sampler) is not BatchSampler:
            return False
        self._start = batches * (1 if sampler is None else sampler.batch_size)
        return True

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        return islice(super().__iter__(), start, None)
