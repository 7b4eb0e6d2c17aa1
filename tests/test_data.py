"""`springline.epochs` over anything that has a length."""

import logging
import subprocess
import sys

import pytest

import springline
from springline import progress
from springline.run import Run


class Loader:
    """Batches, and what a loader of torch has beside them."""

    def __init__(self, *batches, sampler=None):
        self.batches, self.sampler, self.epochs = batches, sampler, []

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.fixture
def restarted(monkeypatch):
    """`restarted(steps)`: this process is a worker that had made so many."""

    def restarted(steps):
        monkeypatch.setattr(progress, "_count", progress._Count())
        monkeypatch.setattr(Run, "start_step", lambda _: steps)

    restarted(0)
    return restarted


def whole(epochs):
    return [(epoch, list(batches)) for epoch, batches in epochs]


@pytest.mark.parametrize("made", range(8))
def test_only_what_is_left_comes_after_a_restart(restarted, made):
    restarted(made)
    loader = Loader("a", "b", "c")
    every = [(epoch, batch) for epoch in range(2) for batch in "abc"]
    left = whole(springline.epochs(loader, 2))
    assert [(epoch, batch) for epoch, batches in left for batch in batches] == every[made:]
    assert all(batches for _, batches in left)
    assert loader.epochs == [epoch for epoch, _ in left]  # its order was chosen
    assert progress.counted() == max(6, made)


def test_steps_go_on_after_epochs(restarted):
    restarted(7)
    assert whole(springline.epochs([1, 2, 3], 2)) == []
    assert list(springline.steps(3)) == [1, 2]


def test_a_loop_that_is_left_early_is_over(restarted):
    for _, batches in springline.epochs([1, 2, 3], 2):
        assert next(batches) == 1
        assert not progress.is_over()
        break
    assert progress.is_over()
    assert list(batches) == []


def test_between_two_epochs_the_training_is_not_over(restarted):
    over = []
    for _, batches in springline.epochs([1, 2, 3], 2):
        over.append((list(batches), progress.is_over()))
    assert over == [([1, 2, 3], False)] * 2
    assert progress.is_over()


def test_an_epoch_that_is_cut_short_does_not_shift_the_next(restarted):
    made = []
    for epoch, batches in springline.epochs([1, 2, 3], 2):
        for batch in batches:
            made.append((epoch, batch, progress.counted()))
            if (epoch, batch) == (0, 2):
                break
    assert made == [(0, 1, 1), (0, 2, 2), (1, 1, 4), (1, 2, 5), (1, 3, 6)]


def test_when_all_are_asked_to_stop_no_epoch_follows(restarted, monkeypatch, directory):
    monkeypatch.setenv("SPRINGLINE_RUN", str(directory))
    begun = []
    for epoch, batches in springline.epochs([1, 2, 3], 3):
        begun.append(epoch)
        for _ in batches:
            springline.stop()
    assert begun == [0]


def test_an_order_by_epoch_is_asked_of_all_that_have_one(restarted):
    inner = Loader()
    whole(springline.epochs(Loader("a", sampler=inner), 2))
    assert inner.epochs == [0, 1]


@pytest.mark.parametrize(
    ("loader", "n", "error", "sentence"),
    [
        ([1], -1, ValueError, "`n` must be an integer >= 0. Received: n=-1."),
        (iter([1]), 1, TypeError, "`loader` must have a length"),
        ([], 1, ValueError, "`loader` must have batches. Received: list of length 0."),
    ],
)
def test_what_cannot_be_counted_is_refused_at_once(loader, n, error, sentence):
    with pytest.raises(error) as refused:
        springline.epochs(loader, n)
    assert sentence in str(refused.value)


def test_steps_that_a_reloaded_checkpoint_may_count_twice_are_warned_of(restarted, caplog):
    caplog.set_level(logging.INFO, "springline")
    restarted(7)
    progress.note_loaded()
    for _ in range(2):
        assert list(springline.steps(3)) == []
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "Rank 0 skips these 3 steps" in warning.getMessage()
    assert "begin with epoch 0" in warning.getMessage()


def test_import_springline_does_not_import_torch():
    code = "import springline, sys; springline.epochs([1], 1); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def test_data_that_no_sampler_divides_is_warned_of(restarted, monkeypatch, caplog):
    class RandomSampler:
        """As torch's own."""

    whole(springline.epochs(Loader("a", sampler=RandomSampler()), 1))
    assert not caplog.records  # alone
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    whole(springline.epochs(Loader("a"), 1))
    assert not caplog.records  # of a list nothing is known
    whole(springline.epochs(Loader("a", sampler=RandomSampler()), 1))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "RandomSampler does not divide its data between the 2 workers" in said
