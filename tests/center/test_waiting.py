"""Waiting is never silent, and locks behave."""

import errno
import fcntl
import itertools

import pytest

from springline.center import RoundTimeoutError, waiting
from springline.center.locks import RANK, RecordLocks, ThreadLocks


def test_a_long_wait_says_for_whom_again_and_again(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "WARN_EVERY", 0.05)
    missing = {3, 1}

    def done():
        if len(caplog.records) == 2:
            missing.discard(1)
        return len(caplog.records) == 3

    waiting.wait_until(done, lambda: missing, 60, "round 7")
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 3
    first, _, third = (r.getMessage() for r in caplog.records)
    assert first.startswith("Waiting for round 7 since")
    assert first.endswith("rank 1, rank 3")
    assert third.endswith(": rank 3")


def test_the_first_warning_comes_after_half_a_minute():
    assert waiting.WARN_EVERY == 30


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
        locks = RecordLocks.of(tmp_path / "lock")
        yield locks
        locks.close()


def test_a_lock_is_taken_once_and_asking_never_takes_it(locks):
    assert not locks.held(RANK)
    assert locks.take(RANK)
    assert not locks.take(RANK)
    assert locks.held(RANK)
    assert locks.take(RANK + 1)
    locks.release(RANK)
    assert not locks.held(RANK)
    assert locks.held(RANK + 1)
    assert locks.take(RANK)


def test_a_lock_is_given_back_after_an_error(locks):
    with pytest.raises(ZeroDivisionError), locks.hold(0):
        raise ZeroDivisionError
    assert locks.take(0)


def test_a_process_has_one_descriptor_per_lock_file(tmp_path):
    one, two = RecordLocks.of(tmp_path / "lock"), RecordLocks.of(tmp_path / "lock")
    assert one is two
    one.close()
    assert two.take(0)
    two.close()
    assert RecordLocks.of(tmp_path / "lock").close() is None


def test_what_only_looks_like_a_deadlock_is_tried_again(tmp_path, monkeypatch):
    locks, lockf, calls = RecordLocks.of(tmp_path / "lock"), fcntl.lockf, itertools.count()

    def seldom(*args):
        if next(calls) < 3:
            raise OSError(errno.EDEADLK, "Resource deadlock avoided")
        return lockf(*args)

    monkeypatch.setattr(fcntl, "lockf", seldom)
    with locks.hold(0):
        assert next(calls) == 4
    locks.close()
