"""`ResumableSampler`: whose samples they are, in which order, from where on."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

import springline
from springline import progress
from springline.run import Run
from springline.torch import ResumableSampler


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_parts_make_up_the_dataset_in_every_epoch(workers, drop_last):
    dataset, orders = range(50), []
    for epoch in range(3):
        parts = []
        for rank in range(workers):
            options = {"drop_last": drop_last, "seed": 5}
            sampler = ResumableSampler(dataset, rank=rank, workers=workers, **options)
            theirs = DistributedSampler(dataset, workers, rank, **options)
            sampler.set_epoch(epoch)
            theirs.set_epoch(epoch)
            parts.append(list(sampler))
            assert parts[-1] == list(theirs)
        (length,) = {len(part) for part in parts}  # every worker makes as many steps
        seen = [index for part in parts for index in part]
        if drop_last:
            assert len(set(seen)) == len(seen) == 50 // workers * workers
        else:
            assert set(seen) == set(dataset)
            assert len(seen) == length * workers < 50 + workers
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_rank_and_workers_are_the_runs(monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "3")
    monkeypatch.setenv("SPRINGLINE_RANK", "2")
    assert list(ResumableSampler(range(9), shuffle=False)) == [2, 5, 8]


class Reads(torch.utils.data.Dataset):
    def __init__(self):
        self.read = []

    def __len__(self):
        return 23

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Pairs(BatchSampler):
    """A batch sampler of a user's own, whose batches are not what `batch_size` says."""

    def __iter__(self):
        order = list(self.sampler)
        return (order[n : n + 2] for n in range(0, len(order), 2))

    def __len__(self):
        return 12


LOADERS = {
    "batch_size": lambda data, ours: DataLoader(data, 4, sampler=ours),
    "drop_last": lambda data, ours: DataLoader(data, 4, sampler=ours, drop_last=True),
    "no batches": lambda data, ours: DataLoader(data, None, sampler=ours),
    "BatchSampler": lambda data, ours: DataLoader(data, batch_sampler=BatchSampler(ours, 4, False)),
    "batch sampler of one's own": lambda data, ours: DataLoader(
        data, batch_sampler=Pairs(ours, 4, False)
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_is_resumed_without_reading_what_was_made(kind, monkeypatch):
    def trained(made):
        monkeypatch.setattr(progress, "_count", progress._Count())
        monkeypatch.setattr(Run, "start_step", lambda _: made)
        data = Reads()
        loader = LOADERS[kind](data, ResumableSampler(data))
        steps = [
            (epoch, torch.as_tensor(batch).tolist())
            for epoch, batches in springline.epochs(loader, 2)
            for batch in batches
        ]
        return steps, len(data.read), len(loader)

    every, read, length = trained(0)
    for made in (1, length - 1, length, length + 3):
        left, read_again, _ = trained(made)
        assert left == every[made:]
        dropped = made % length * 2 if kind == "batch sampler of one's own" else 0
        done = [index for _, batch in every[:made] for index in torch.as_tensor(batch).reshape(-1)]
        assert read_again == read - len(done) + dropped


@pytest.mark.parametrize(
    ("dataset", "options", "error", "sentence"),
    [
        (iter([1]), {}, TypeError, "An IterableDataset has no sampler"),
        ([], {}, ValueError, "a sample for each of the 2 workers. Received: 0 samples"),
        ([1], {"drop_last": True}, ValueError, "Received: 1 samples, drop_last=True"),
    ],
)
def test_a_dataset_that_cannot_be_shared_out_is_refused(dataset, options, error, sentence):
    with pytest.raises(error) as refused:
        ResumableSampler(dataset, rank=0, workers=2, **options)
    assert sentence in str(refused.value)


def test_an_iterable_dataset_needs_a_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    class Sized(Stream):
        def __len__(self):
            return 10

    with pytest.raises(TypeError, match="Give an IterableDataset a `__len__`"):
        springline.epochs(DataLoader(Stream(), 4), 1)
    ((_, batches),) = [(e, list(b)) for e, b in springline.epochs(DataLoader(Sized(), 4), 1)]
    assert [len(batch) for batch in batches] == [4, 4, 2]


def test_it_does_not_guess_what_a_loader_of_ones_own_takes():
    sampler = ResumableSampler(range(6), shuffle=False, rank=0, workers=1)

    class Pairs:
        def __iter__(self):
            found = iter(sampler)
            return zip(found, found, strict=True)

    assert not sampler.skip(1, Pairs())
    assert list(Pairs()) == [(0, 1), (2, 3), (4, 5)]
