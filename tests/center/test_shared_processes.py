"""The shared center among real processes: creating, dying, forking, reading."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import forks
from springline import AGN, DiLoCo, ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import CenterError, Layout, RankError
from springline.center.locks import RecordLocks
from springline.center.plan import CONTRIBUTED
from springline.rules import SGD, Adam

ELASTIC = ElasticAverage(workers=2, period=1, moving_rate=0.5)
AVERAGE = ModelAverage(workers=2, period=1)
IN_TURN = ModelAverage(workers=2, period=4)
DELAYED = DiLoCo(workers=2, period=4, delay=2, outer=SGD(1.0))
SMALL = {"v": np.zeros(4, np.float32)}


def create(directory, number, size=4, rule=ELASTIC):
    values = {"v": np.full(size, number, np.float32)}
    return SharedCenter.create_or_join(directory, Layout.of(values), rule, values)


def race(pipe, barrier, directories, number):
    seen = []
    for directory in directories:
        barrier.wait(60)
        with create(directory, number, size=100_000) as center:
            seen.append(np.unique(center.values()["v"]).tolist())
    pipe.send(seen)


def test_those_who_create_at_the_same_instant_agree(directory, start, memories):
    count, rounds = 8, [directory / str(k) for k in range(30)]
    barrier = forks.context.Barrier(count)
    directory.mkdir()
    pipes = [start(race, barrier, rounds, number)[1] for number in range(count)]
    seen = [pipe.recv() for pipe in pipes]
    for place, answers in zip(rounds, zip(*seen, strict=True), strict=True):
        (winner,) = answers[0]
        assert winner in range(count)
        assert all(answer == [winner] for answer in answers)
        assert len(memories(place)) == 1


INSTANTS = {
    "before its memory": (os, "posix_fallocate"),
    "before its values": (SharedCenter, "initialise"),
    "before layout.json": (SharedCenter, "_publish"),
    "before its rename": (Path, "replace"),
}


def create_and_die(pipe, directory, instant):
    owner, name = INSTANTS[instant]
    original = getattr(owner, name)

    def fatal(*args):
        if name != "replace" or Path(args[1]).name == "layout.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(owner, name, fatal)
    create(directory, 1)


@pytest.mark.parametrize("instant", INSTANTS)
def test_a_creator_killed_halfway_leaves_a_usable_directory(directory, start, memories, instant):
    process, _ = start(create_and_die, directory, instant)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(memories(directory)) == 1
    with create(directory, 2) as center:
        np.testing.assert_array_equal(center.values()["v"], 2)
        with create(directory.with_name("another"), 3):  # whoever creates next sweeps
            assert memories(directory) == [center._path.parent]
        assert center.join(0, ELASTIC).start_step == 0


ASSIGN = ElasticAverage(period=1, moving_rate=1.0)


def write_constants(pipe, directory, size):
    worker = Worker({"v": np.zeros(size, np.float32)}, ASSIGN, directory)
    while not pipe.poll():
        worker.parameters["v"][:] = worker.local_step % 1000
        worker.step()
    pipe.send("done")


def test_a_read_is_consistent_per_shard(directory, start):
    size = 2_000_000
    with create(directory, 0, size, ASSIGN) as center:
        _, pipe = start(write_constants, directory, size)
        buffer, seen, deadline = center.layout.allocate(), set(), time.monotonic() + 60
        assert len(center.plan.shards) > 10
        while len(seen) < 100 and time.monotonic() < deadline:
            center.read(buffer)
            for shard in center.plan.shards:
                values = shard.view(buffer)
                assert values.min() == values.max()
                seen.add(float(values[0]))
        pipe.send("stop")
        assert pipe.recv() == "done"
        assert len(seen) >= 100


def be_a_member(pipe, directory, rule, rank):
    """Join, leave a forked child behind as a DataLoader would, and wait to be killed."""
    worker = Worker(SMALL, rule, directory, rank, synchronous=False)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    pipe.send((child, worker.center.members()))
    pipe.recv()


@pytest.fixture
def member(start):
    """`member(directory, rule, rank)` starts one that has a child, and tells its process."""
    children = []

    def member(directory, rule, rank):
        process, pipe = start(be_a_member, directory, rule, rank)
        child, members = pipe.recv()
        children.append(child)
        assert rank in members
        return process

    yield member
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_the_rank_of_a_killed_process_can_be_taken_at_once(directory, member):
    with create(directory, 0) as center:
        process = member(directory, ELASTIC, 1)
        assert center.members() == [1]
        with pytest.raises(RankError, match="Rank 1 is in use"):
            center.join(1, ELASTIC)
        process.kill()
        process.join()
        assert center.members() == []
        center.join(1, ELASTIC)
        assert center.members() == [1]


def test_who_dies_while_others_wait_is_dropped_within_a_second(directory, member, background):
    worker = Worker(SMALL, AVERAGE, directory, 0, synchronous=False, timeout=20)
    process = member(directory, AVERAGE, 1)
    worker.parameters["v"][:] = 3
    waiting = background(worker.exchange)
    deadline = time.monotonic() + 20
    while worker.center.memory.ranks[0, CONTRIBUTED] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not waiting.done()
    process.kill()
    process.join()
    waiting.result(timeout=1)
    np.testing.assert_array_equal(worker.center.values()["v"], 3)
    worker.center.close()


def contribute_and_wait(pipe, directory, rule):
    """Make a message in the background, and go on as if there were long steps to make."""
    overlap = not rule.delay
    worker = Worker(SMALL, rule, directory, 1, synchronous=False, overlap=overlap)
    worker.begin()
    worker.parameters["v"][:] -= 3
    worker.step()
    worker.local_step += 2  # the next step counts as the fourth
    worker.step()
    pipe.send("on its way")
    pipe.recv()


@pytest.mark.parametrize("back", ["before", "after", "never"])
@pytest.mark.parametrize("rule", [DELAYED, IN_TURN], ids=["diloco", "average"])
def test_what_a_worker_has_sent_counts_if_it_dies_during_the_delay(
    directory, start, background, rule, back
):
    """Also if its rank is back before the round is closed; it has made those steps then."""
    worker = Worker(SMALL, rule, directory, 0, synchronous=False, timeout=20)
    worker.begin()
    process, pipe = start(contribute_and_wait, directory, rule)
    assert pipe.recv() == "on its way"
    deadline = time.monotonic() + 20
    while worker.center.memory.ranks[1, CONTRIBUTED] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.join()
    assert worker.center.progress()[1].steps == 0  # nor in a checkpoint that is written now

    def again():
        return Worker(SMALL, rule, directory, 1, synchronous=False, timeout=20)

    new = background(again) if back == "before" else None
    while new and worker.center.members() != [0, 1]:
        time.sleep(0.001)
    worker.parameters["v"][:] -= 1
    worker.exchange()
    np.testing.assert_array_equal(worker.center.values()["v"], SMALL["v"] - 2)  # the mean
    assert worker.center.progress()[1].steps == 4
    if back != "never":
        new = new.result(20) if new else again()
        assert new.start_step == 4
        if back == "after" or rule.delay:  # else it has joined with the center before the round
            np.testing.assert_array_equal(new.parameters["v"], SMALL["v"] - 2)
    worker.center.close()


def use_what_the_parent_opened(pipe, worker):
    answers = []
    for call in (
        worker.exchange,
        worker.center.read,
        worker.center.save,
        lambda: worker.center.join(1, ELASTIC),
    ):
        try:
            call()
            answers.append("worked")
        except CenterError as error:
            answers.append(str(error))
    with SharedCenter.open(worker.center.directory) as own:  # its own is fine
        answers.append(own.members())
        own.join(1, ELASTIC)
    worker.member.leave()
    worker.center.close()
    pipe.send(answers)


def list_members(pipe, directory):
    with SharedCenter.open(directory) as center:
        pipe.send(center.members())


def members_seen_from_outside(start, directory):
    return start(list_members, directory)[1].recv()


def test_a_forked_child_may_not_use_its_parents_center(directory, start):
    worker = Worker(SMALL, ELASTIC, directory, 0)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=use_what_the_parent_opened, args=(theirs, worker))
    child.start()
    *refusals, members = ours.recv()
    child.join()
    assert child.exitcode == 0
    for words in refusals:
        assert f"opened in process {os.getpid()} and is used in its child {child.pid}" in words
    assert members == [0]
    assert members_seen_from_outside(start, directory) == [0]
    worker.exchange()
    worker.center.close()
    assert members_seen_from_outside(start, directory) == []


def test_closing_one_center_of_a_process_keeps_the_locks_of_another(directory, start):
    one, two = create(directory, 0), SharedCenter.open(directory)
    one.join(0, ELASTIC)
    two.join(1, ELASTIC)
    with create(directory, 0), SharedCenter.open(directory):
        two.close()
    with pytest.raises(CenterError):
        SharedCenter.create_or_join(directory, one.layout, AVERAGE, SMALL)
    assert members_seen_from_outside(start, directory) == [0]
    one.close()


def adam_steps(pipe, directory, rank):
    worker = Worker(SMALL, ADAM, directory, rank)
    pipe.send("ready")
    pipe.recv()
    for _ in range(50):
        worker.observe({"v": np.ones(4, np.float32)})
        worker.step()
    worker.finish()
    pipe.send(worker.parameters["v"].tolist())


ADAM = AGN(workers=2, period=1, outer=Adam(0.1))


def test_the_outer_state_is_one_whoever_applies_it(directory, start):
    """Two processes make 50 steps each; the center and its Adam have made 100."""
    pipes = [start(adam_steps, directory, rank)[1] for rank in (0, 1)]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * 2
    for pipe in pipes:
        pipe.send("go")
    ends = [pipe.recv() for pipe in pipes]
    alone = Worker(SMALL, AGN(period=1, outer=Adam(0.1)))
    for _ in range(100):
        alone.observe({"v": np.ones(4, np.float32)})
        alone.step()
    with SharedCenter.open(directory) as center:
        np.testing.assert_array_equal(center.values()["v"], alone.parameters["v"])
        assert alone.parameters["v"].tolist() in ends  # whoever came last has it
        np.testing.assert_array_equal(center.memory.state, alone.center.memory.state)


def fork_slowly(pipe, directory):
    """Join, and fork a child that does not run for a while: it has the locks until it does."""
    worker, parent, close = Worker(SMALL, ELASTIC, directory, 1), os.getpid(), RecordLocks.close

    def slow(locks):
        if os.getpid() != parent:
            time.sleep(1.0)
        close(locks)

    RecordLocks.close = slow
    if os.fork() == 0:
        os.read(pipe.fileno(), 1)  # until the parent, and the test, are gone
        os._exit(0)
    pipe.send(worker.rank)
    pipe.recv()


def test_a_rank_is_free_though_a_child_that_was_just_forked_has_its_lock(directory, start):
    process, pipe = start(fork_slowly, directory)
    assert pipe.recv() == 1
    process.kill()
    process.join()
    with Worker(SMALL, ELASTIC, directory, 1) as worker:
        assert worker.center.members() == [1]
    worker.center.close()
