"""Epochs: a worker's passes through its data, counted with its steps."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from springline import checks
from springline.progress import Claim, in_loop
from springline.run import workers

_log = logging.getLogger("springline")
Batch = TypeVar("Batch", covariant=True)


def epochs(loader: Iterable[Batch], n: int) -> Iterator[tuple[int, Iterator[Batch]]]:
    """Go through a loader `n` times, or until all are asked to stop; each batch is a step.

    After the inner loop an epoch is over::

        for epoch, batches in springline.epochs(loader, 10):
            for batch in batches:
                ...
            evaluate(...)

    Before each epoch, `set_epoch(epoch)` of the loader, its samplers and its dataset is called,
    where there is one. A worker that was restarted makes only what its rank had not made: epochs
    that it had completed are left out, and the first goes on in its middle. A
    `springline.torch.ResumableSampler` begins there; from any other the batches before it are drawn
    and dropped. The batches of an epoch end when the next one begins.

    Args:
        loader: anything that has a length and can be iterated over again: a `DataLoader`, a list.
        n: how many epochs there are in all, also after a restart.

    >>> for epoch, batches in epochs(["a", "b"], 2):
    ...     print(epoch, list(batches))
    0 ['a', 'b']
    1 ['a', 'b']
    """
    checks.count("n", n)
    length = _length(loader)
    _warn_of_undivided(loader)
    return _epochs(loader, length, n, Claim(n * length))  # now: the steps are its own


def _warn_of_undivided(loader: Any) -> None:
    """Warn of torch's own samplers in a run: each worker would draw all of the data."""
    sampler = type(getattr(getattr(loader, "batch_sampler", loader), "sampler", None))
    if workers() > 1 and sampler.__name__ in ("RandomSampler", "SequentialSampler"):
        _log.warning(
            "The loader's %s does not divide its data between the %d workers: each draws all of "
            "it. Give `DataLoader(..., sampler=springline.torch.ResumableSampler(dataset))`, "
            "unless the dataset is this worker's own part already.",
            sampler.__name__,
            workers(),
        )


def _length(loader: Any) -> int:
    try:
        length = len(loader)
    except TypeError as error:
        raise TypeError(
            "`loader` must have a length: the number of batches in an epoch. Received: "
            f"{type(loader).__name__}, whose length is unknown ({error}). Give an IterableDataset "
            "a `__len__`, or count with `for step in springline.steps(n)`."
        ) from error
    if not length:
        raise ValueError(
            f"`loader` must have batches. Received: {type(loader).__name__} of length 0. Is this "
            "worker's part of the data smaller than a batch, and dropped (`drop_last`)?"
        )
    return length


def _epochs(
    loader: Iterable[Batch], length: int, n: int, claim: Claim
) -> Iterator[tuple[int, Iterator[Batch]]]:
    with in_loop():
        for epoch in range(n):
            first = epoch * length
            made = claim.made(first, length)
            if made == length:
                continue
            if claim.run.stopping():
                return
            batches = _batches(
                loader, epoch, made, claim.steps(range(first + made, first + length))
            )
            try:
                yield epoch, batches
            finally:
                batches.close()


def _batches(
    loader: Iterable[Batch], epoch: int, made: int, steps: Iterator[int]
) -> Generator[Batch, None, None]:
    """Yield what is left of an epoch: for each step a batch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    parts = loader, batch_sampler, sampler, getattr(loader, "dataset", None)
    for part in {id(part): part for part in parts}.values():
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
    if made and callable(skip := getattr(sampler, "skip", None)) and skip(made, loader):
        made = 0  # they do not come
    left = islice(iter(loader), made, None)
    nothing = object()
    for _ in steps:
        batch: Any = next(left, nothing)
        if batch is nothing:  # its length was a guess
            return
        yield batch
