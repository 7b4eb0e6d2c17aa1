"""Epochs over a DataLoader under `springline run`: every sample once, also after a kill -9."""

import math
from pathlib import Path

import epochs_script as script
import pytest

from marks import slow
from springline.torch import ResumableSampler

SCRIPT = Path(script.__file__)
DONE = script.DIES[1] // 2 * 2  # batches of the epoch that were exchanged before the kill


def expected(rank, size, drop_last=False):
    """What an uninterrupted worker trains on: its epochs, and the batches of each."""
    sampler = ResumableSampler(range(script.SAMPLES), rank=rank, workers=script.WORKERS)
    for epoch in range(script.EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        batches = [order[n : n + size] for n in range(0, len(order), size)]
        yield [batch for batch in batches if len(batch) == size or not drop_last]


def noted(run, kind, rank, incarnation):
    lines = (run.path / f"{kind}-{rank}-{incarnation}").read_text().splitlines()
    return [[int(word) for word in line.split()] for line in lines]


@pytest.mark.parametrize("ways", ["ours fork", *slow("ours spawn", "ours none", "batches none")])
def test_a_killed_worker_goes_on_in_the_middle_of_its_epoch(train_epochs, run, ways):
    way, context = ways.split()
    train_epochs(way, context)
    plans = [list(expected(rank, script.BATCH, way == "batches")) for rank in range(2)]
    length = len(plans[0][0])
    steps = [[[e, *batch] for e, batches in enumerate(plan) for batch in batches] for plan in plans]
    assert noted(run, "trained", 0, 1) == steps[0]
    assert run.steps() == [len(steps[0])] * 2
    assert (run.path / "total").read_text() == f"{len(steps[0])}\n"  # known at once

    killed, resumed = noted(run, "trained", 1, 1), noted(run, "trained", 1, 2)
    epoch, batch = script.DIES
    assert killed == steps[1][: epoch * length + batch + 1]
    begun = len(steps[1]) - len(resumed)
    assert epoch * length <= begun <= epoch * length + batch + 1
    assert begun % length  # in the middle
    assert resumed == steps[1][begun:]
    read = {index for (index,) in noted(run, "read", 1, 2)[: length - begun % length]}
    skipped = {index for step in steps[1][epoch * length : begun] for index in step[1:]}
    assert not read & skipped
    assert len(noted(run, "read", 1, 2)) == sum(len(step) - 1 for step in resumed)
    assert noted(run, "evaluated", 1, 1) == [[0]]
    assert noted(run, "evaluated", 1, 2) == [[1], [2]]

    if way == "ours":
        for epoch in range(script.EPOCHS):
            seen = [i for plan in plans for batch in plan[epoch] for i in batch]
            assert sorted(seen) == list(range(script.SAMPLES))


@pytest.mark.slow
def test_from_another_sampler_what_was_made_is_drawn_and_dropped(train_epochs, run):
    train_epochs("theirs", "none")
    plan = [[e, *batch] for e, epoch in enumerate(expected(1, script.BATCH)) for batch in epoch]
    resumed = noted(run, "trained", 1, 2)
    assert resumed == plan[len(plan) - len(resumed) :]
    drawn = len(noted(run, "read", 1, 2)) - sum(len(step) - 1 for step in resumed)
    length = math.ceil(script.SAMPLES / script.WORKERS / script.BATCH)
    assert drawn == (len(plan) - len(resumed)) % length * script.BATCH > 0


@pytest.fixture
def train_epochs(start_command, run):
    """`train_epochs(way, context)` runs the script on two workers, to its end."""

    def train_epochs(*words):
        options = ["--workers", script.WORKERS, "--run", run.path]
        running = start_command("run", *options, SCRIPT, *words)
        assert running.wait(120) == 0, running.output
        assert "Worker 1 was killed by SIGKILL" in running.output

    return train_epochs
