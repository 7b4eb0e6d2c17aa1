"""Centers that are closed, retired or replaced behind one's back."""

import os
import signal
import tempfile
import threading

import numpy as np
import pytest

from springline import ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import CenterError, Layout, memory_file
from springline.center.plan import CLOSED, CONTRIBUTED, MEMBER_OF
from springline.center.segments import sweep

RULE = ElasticAverage(period=1, moving_rate=1.0)
VALUES = {"v": np.zeros(4, np.float32)}


def step_to(directory, value):
    """A worker that leaves the center at a value, and retires it."""
    worker = Worker(VALUES, RULE, directory)
    worker.parameters["v"][:] = value
    worker.step()
    worker.finish()
    worker.center.retire()


def test_a_center_that_was_replaced_cannot_save_over_newer_work(directory):
    with Worker(VALUES, RULE, directory) as worker:
        stale = SharedCenter.open(directory)
    worker.center.retire()
    step_to(directory, 4)
    for use in (stale.save, stale.retire, lambda: stale.join(0, RULE)):
        with pytest.raises(CenterError, match="was retired; open it again"):
            use()
    stale.close()
    with SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES) as center:
        assert (center.version, center.values()["v"].tolist()) == (1, [4] * 4)
        center.retire()


def test_a_closed_center_says_so(directory):
    center = SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES)
    center.retire()
    center.close()
    for use in (center.read, center.save, center.retire, lambda: center.join(0, RULE)):
        with pytest.raises(CenterError, match="This center is closed"):
            use()


@pytest.mark.parametrize(
    ("module", "call"), [(tempfile, "mkdtemp"), (os, "open"), (os, "posix_fallocate")]
)
def test_a_sweep_while_memory_is_made_does_no_harm(directory, tmpfs, monkeypatch, module, call):
    """Before it is locked the memory may be swept, and is made again; then it is spared."""
    step_to(directory, 4)
    do, swept = getattr(module, call), []

    def do_then_sweep(*args, **options):
        done = do(*args, **options)
        if not swept and list(tmpfs.glob("*")):
            swept.extend(tmpfs.glob("*"))
            sweep()
        return done

    monkeypatch.setattr(module, call, do_then_sweep)
    with Worker(VALUES, RULE, directory) as worker:
        assert worker.parameters["v"].tolist() == [4] * 4
    assert [home.exists() for home in swept] == [call == "posix_fallocate"]
    assert list(tmpfs.iterdir()) == [worker.center._path.parent]
    worker.center.close()


def test_the_orphan_of_a_failed_creation_is_swept_by_the_next(directory, tmpfs, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr("springline.center.shared.free", lambda *_: None)
        with pytest.raises(KeyError):
            SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, {})
    assert len(list(tmpfs.iterdir())) == 1
    SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES).close()
    assert len(list(tmpfs.iterdir())) == 1


def test_an_unwritable_tmpfs_is_passed_over(directory, tmpfs, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(memory_file.tempfile, "mkdtemp", refuse)
    with SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES) as center:
        assert center._path.parent == directory


def test_a_directory_with_a_lock_and_other_things_is_not_ours(directory):
    directory.mkdir(mode=0o755)
    for name in ("lock", "thesis.tex"):
        (directory / name).touch()
    with pytest.raises(CenterError, match="it holds 'thesis"):
        Worker(VALUES, RULE, directory)
    assert directory.stat().st_mode & 0o777 == 0o755


def test_new_parents_are_private_too(directory):
    Worker(VALUES, RULE, directory / "below").center.close()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_round_that_was_closed_and_not_reduced_is_reduced_by_who_joins(directory):
    rule = ModelAverage(period=1)
    with Worker(VALUES, rule, directory) as dead:
        memory = dead.center.memory
        memory.slots[0].view(np.float32)[:4] = 7
        memory.ranks[0, [CONTRIBUTED, MEMBER_OF]] = 1
        memory.head[CLOSED] = 1  # and then it is killed
    with Worker(VALUES, rule, directory) as again:
        assert again.parameters["v"].tolist() == [7] * 4
        assert again.center.version == 1
    again.center.retire()


def test_a_signal_handler_may_finish_a_worker_that_waits(directory):
    """As a script's own handler of SIGTERM would."""
    rule = ModelAverage(period=1, workers=2)
    layout = Layout.of(VALUES)
    with SharedCenter.create_or_join(directory, layout, rule, VALUES) as center:
        other = center.join(1, rule)
        worker = Worker(VALUES, rule, center, synchronous=False)

        before = signal.signal(signal.SIGALRM, lambda *_: worker.finish())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(CenterError, match="Rank 0 has left"):
                worker.step()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert center.members() == [1]
        other.leave()


def test_an_interrupted_wait_does_not_spoil_the_round_of_the_others(directory):
    rule = ModelAverage(period=1, workers=2)
    workers = [Worker(VALUES, rule, directory, k, synchronous=False) for k in range(2)]
    for worker, value in zip(workers, (2, 4), strict=True):
        worker.parameters["v"][:] = value

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            workers[0].step()
    finally:
        signal.signal(signal.SIGALRM, before)
    workers[0].parameters["v"][:] = 100
    second = threading.Thread(target=workers[1].step)
    second.start()
    second.join(20)  # the first has withdrawn: the round is the second's alone
    assert workers[1].parameters["v"].tolist() == [4] * 4
    both = [threading.Thread(target=worker.step) for worker in workers]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(20)
    assert workers[0].parameters["v"].tolist() == workers[1].parameters["v"].tolist() == [52] * 4
    for worker in workers:
        worker.center.close()


@pytest.mark.parametrize("text", [b"\xff\xfe", b"a\0b", b""])
@pytest.mark.parametrize("name", ["run", "identity"])
def test_a_damaged_note_beside_one_centers_memory_costs_no_other_center(
    tmp_path, tmpfs, name, text
):
    worker = Worker(VALUES, RULE, tmp_path / "one")
    (home,) = tmpfs.iterdir()
    (home / name).write_bytes(text)
    with Worker(VALUES, RULE, tmp_path / "two") as other:
        other.step()
    other.center.retire()
    worker.center.close()
