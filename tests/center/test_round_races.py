"""Instants of a round that luck hardly ever hits, forced."""

import contextlib
import threading
from concurrent.futures import wait

import numpy as np
import pytest

from springline import DiLoCo, LocalCenter, ModelAverage, outer
from springline.center import CenterError, Layout, Local, RoundTimeoutError
from springline.center.locks import SHARD
from springline.center.plan import CLOSED, CONTRIBUTED, MEMBER_OF, READING
from springline.center.rounds import MemoryRounds

RULE = ModelAverage(period=1, workers=2)
LAYOUT = Layout.of({"w": np.zeros(4, np.float32)})


def make(use_locking=True):
    center = LocalCenter(LAYOUT, RULE, {"w": np.zeros(4)}, use_locking=use_locking)
    return center, [Local(LAYOUT, RULE) for _ in range(2)]


def fill(local, value):
    LAYOUT.views(local.x)["w"][:] = value


def held(local):
    return LAYOUT.views(local.x)["w"].tolist()


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def until_it_leaves(member, local):
    with contextlib.suppress(CenterError):
        member.exchange(local)


def test_a_shard_is_not_reduced_again_from_the_next_rounds_slots():
    """Rank 0 finds a shard unreduced and is held up; rank 1 reduces it and goes on."""
    center, locals_ = make()
    members = [center.join(rank, RULE) for rank in range(2)]
    asked, written = threading.Event(), threading.Event()
    acquire, settle = center.locks.try_acquire, members[1]._mode._settle

    def slow_acquire(number):
        if number == SHARD and threading.current_thread() is first:
            if not asked.is_set():
                asked.set()
                assert written.wait(20)
        elif number == SHARD:
            assert asked.wait(20)
        return acquire(number)

    def settle_and_tell(this, steps):
        if this == 2:
            written.set()
        settle(this, steps)

    def second_worker():
        members[1].exchange(locals_[1])
        fill(locals_[1], 100)
        members[1].exchange(locals_[1])

    center.locks.try_acquire, members[1]._mode._settle = slow_acquire, settle_and_tell
    fill(locals_[0], 0)
    fill(locals_[1], 2)
    first = threading.Thread(target=lambda: members[0].exchange(locals_[0]), daemon=True)
    first.start()
    second = in_thread(second_worker)
    first.join(30)
    assert held(locals_[0]) == [1] * 4
    members[0].leave()
    second.join(30)
    assert not second.is_alive()


def test_a_new_worker_waits_until_nobody_reads_its_predecessors_slot():
    """Rank 0 is still adopting a round to which the worker before rank 1's had contributed."""
    center, locals_ = make(use_locking=False)
    center.join(0, RULE)
    ranks, head = center.memory.ranks, center.memory.head
    head[CLOSED] = 1
    ranks[:, MEMBER_OF] = 1
    ranks[:, CONTRIBUTED] = ranks[0, READING] = 1
    center.memory.slots[1][:] = 0
    newcomer = center.join(1, RULE)
    fill(locals_[1], 7)
    thread = in_thread(lambda: until_it_leaves(newcomer, locals_[1]))
    thread.join(0.3)
    assert thread.is_alive()
    assert not center.memory.slots[1].any()  # not touched yet
    ranks[0, READING] = 0
    for _ in range(2000):
        if center.memory.slots[1].any():
            break
        threading.Event().wait(0.01)
    assert center.memory.slots[1].any()
    center.close()


def test_nobody_uses_a_slot_again_that_a_new_worker_reads(background):
    """Without locks two may reduce the same shard; the newcomer, in no round yet, is the slower."""
    center, locals_ = make(use_locking=False)
    first = center.join(0, RULE)
    fill(locals_[0], 5)
    first.exchange(locals_[0])
    newcomer = center.join(1, RULE)
    center.memory.reduced[:] = 0  # as the newcomer finds it, a little earlier
    reduce, reads, go_on = newcomer._mode._reduce_shard, threading.Event(), threading.Event()

    def slow_reduce(*arguments):
        reads.set()
        assert go_on.wait(20)
        reduce(*arguments)

    newcomer._mode._reduce_shard = slow_reduce
    fill(locals_[0], 100)
    fill(locals_[1], 200)
    second = background(lambda: newcomer.exchange(locals_[1]))
    assert reads.wait(20)
    again = background(lambda: first.exchange(locals_[0]))
    assert wait([again], 0.3).not_done
    assert LAYOUT.views(center.memory.slots[0])["w"].tolist() == [5] * 4
    go_on.set()
    for exchange in (again, second):
        exchange.result(20)
    assert held(locals_[0]) == held(locals_[1]) == [150] * 4


def test_the_start_waits_for_who_is_still_joining(background, monkeypatch):
    """A rank that is held but not yet in the rounds would miss the first one."""
    center, _ = make()
    asked, go_on, enter = threading.Event(), threading.Event(), MemoryRounds.enter

    def slow(self):
        if self._member.rank == 1:
            asked.set()
            assert go_on.wait(20)
        enter(self)

    monkeypatch.setattr(MemoryRounds, "enter", slow)
    late = background(lambda: center.join(1, RULE))
    assert asked.wait(20)
    assert center.members() == [1]
    first = center.join(0, RULE, timeout=0.1)
    with pytest.raises(RoundTimeoutError, match="rank 1"):
        first.barrier()
    go_on.set()
    late.result(20).barrier()
    first.barrier()


def test_who_has_missed_a_round_takes_the_center_after_it(background):
    """The round has closed without it, and nobody has reduced it yet."""
    rule = DiLoCo(period=1, workers=2, outer=outer.SGD(1.0))
    center, locals_ = LocalCenter(LAYOUT, rule, {"w": np.zeros(4)}), [Local(LAYOUT, rule)] * 2
    first, second = (center.join(rank, rule) for rank in range(2))
    second._mode._withdraw(1)
    first.take(locals_[0].x)
    fill(locals_[0], 5)
    reduce, closed, go_on = first._mode._reduce, threading.Event(), threading.Event()

    def slow_reduce(sides):
        closed.set()
        assert go_on.wait(20)
        reduce(sides)

    first._mode._reduce = slow_reduce
    exchange = background(lambda: first.exchange(locals_[0]))
    assert closed.wait(20)
    taken = LAYOUT.allocate()
    second.take(taken)
    go_on.set()
    assert exchange.result(20)
    assert LAYOUT.views(taken)["w"].tolist() == held(locals_[0]) == [5] * 4
    center.close()
