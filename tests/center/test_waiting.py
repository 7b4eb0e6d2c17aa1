"""Waiting is never silent, and locks behave."""

import contextlib
import os

import pytest

from springline.center import RoundTimeoutError, waiting
from springline.center.locks import RANK, SHARD, RecordLocks, ThreadLocks


def test_a_long_wait_says_for_whom_again_and_again(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "WARN_AFTER", 0.05)
    monkeypatch.setattr(waiting, "WARN_EVERY", 0.05)
    monkeypatch.setattr(waiting, "_warned", [])
    missing = {3, 1}

    def done():
        if len(caplog.records) == 2:
            missing.discard(1)
        return len(caplog.records) == 3

    waiting.wait_until(done, lambda: missing, 60, "round 7")
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 3
    first, _, third = (r.getMessage() for r in caplog.records)
    assert first.startswith("Still waiting for round 7 after")
    assert first.endswith("rank 1, rank 3")
    assert third.endswith(": rank 3")


def test_the_first_warning_comes_after_five_seconds_then_one_every_half_minute():
    assert (waiting.WARN_AFTER, waiting.WARN_EVERY) == (5, 30)


def test_a_timeout_says_for_whom():
    with pytest.raises(RoundTimeoutError, match=r"0.01 s for round 7; missing: rank 1, rank 3\."):
        waiting.wait_until(lambda: False, lambda: {3, 1}, 0.01, "round 7")


def test_what_is_done_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(waiting.time, "sleep", None)
    waiting.wait_until(lambda: True, set, 0, "nothing")


@pytest.fixture(params=["threads", "records"])
def locks(request, tmp_path):
    if request.param == "threads":
        yield ThreadLocks()
    else:
        locks = RecordLocks(tmp_path / "lock")
        yield locks
        locks.close()


def test_a_lock_is_taken_once_and_asking_never_takes_it(locks):
    assert not locks.held(RANK)
    assert locks.try_acquire(RANK)
    assert not locks.try_acquire(RANK)
    assert locks.held(RANK)
    assert locks.try_acquire(RANK + 1)
    locks.release(RANK)
    assert not locks.held(RANK)
    assert locks.held(RANK + 1)
    assert locks.try_acquire(RANK)


def test_a_lock_is_given_back_after_an_error(locks):
    with pytest.raises(ZeroDivisionError), locks.acquire(0):
        raise ZeroDivisionError
    assert locks.try_acquire(0)


def test_two_users_of_a_lock_file_exclude_each_other_in_one_process_too(tmp_path):
    one, two = RecordLocks(tmp_path / "lock"), RecordLocks(tmp_path / "lock")
    assert one.try_acquire(RANK)
    assert not two.try_acquire(RANK)
    assert two.held(RANK)
    assert two.holder(RANK) == os.getpid()
    two.close()
    assert one.held(RANK)
    one.close()
    with contextlib.closing(RecordLocks(tmp_path / "lock")) as three:
        assert three.holder(RANK) is None
        assert three.try_acquire(RANK)


def test_a_lock_is_not_waited_for_beyond_the_timeout(locks):
    assert locks.try_acquire(SHARD + 3)
    words = "Waited 0.01 s for part 3 of the center; missing: another thread of this process"
    with pytest.raises(RoundTimeoutError, match=words), locks.acquire(SHARD + 3, 0.01):
        pass


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        RecordLocks(tmp_path / "lock")
