"""A script with epochs and a DataLoader, in each of the ways that a user may write it.

`epochs_script.py WAY CONTEXT` notes in its run every batch that a rank has trained on, and every
sample that was read, each with the incarnation of its worker.
"""

import os
import sys
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import springline
from springline.torch import ModelAverageOptimizer, ResumableSampler

SAMPLES, EPOCHS, BATCH, WORKERS = 50, 3, 4, 2
DIES = (1, 2)  # epoch and batch after which rank 1 is killed, once
torch.set_num_threads(1)


class Notes(torch.utils.data.Dataset):
    """Samples that are their own numbers, and note that they are read."""

    def __init__(self, directory, rank):
        self.directory, self.rank = directory, rank
        self.incarnation = 1 + (directory / f"died-{rank}").exists()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.note("read", index)
        return index

    def note(self, kind, *words):
        with (self.directory / f"{kind}-{self.rank}-{self.incarnation}").open("a") as file:
            print(*words, file=file)


def make_loader(way, dataset, **options):
    ours = ResumableSampler(dataset)
    rank = {"num_replicas": springline.workers(), "rank": springline.rank()}
    return {
        "ours": lambda: DataLoader(dataset, BATCH, sampler=ours, **options),
        "batches": lambda: DataLoader(
            dataset, batch_sampler=BatchSampler(ours, BATCH, True), **options
        ),
        "theirs": lambda: DataLoader(
            dataset, BATCH, sampler=DistributedSampler(dataset, **rank), **options
        ),
    }[way]()


def main(way, context):
    dataset = Notes(springline.directory(), springline.rank())
    options = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    loader = make_loader(way, dataset, **(options if context != "none" else {}))
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = ModelAverageOptimizer(inner, model=model, period=2)
    for epoch, batches in springline.epochs(loader, EPOCHS):
        for n, batch in enumerate(batches):
            dataset.note("trained", epoch, *batch.tolist())
            opt.zero_grad()
            model(batch.float()[:, None]).mean().backward()
            opt.step()
            mark = dataset.directory / f"died-{dataset.rank}"
            if (epoch, n) == DIES and dataset.rank == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
            time.sleep(0.01)
        dataset.note("evaluated", epoch)
    opt.final()


if __name__ == "__main__":
    main(*sys.argv[1:])
