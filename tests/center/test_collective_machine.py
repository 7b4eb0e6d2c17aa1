"""Ranks of one machine add up in memory that they share: real processes, some of them killed."""

import contextlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Listener

import collective_ranks
import numpy as np
import pytest
from collective_ranks import RULES, VALUES
from hypothesis import given
from hypothesis import strategies as st

import hosts
from marks import slow
from springline.center import checkpoint
from springline.center.collective.machine import divide

SCENES = [f"{nan}{rule}" for nan in ("", "nan ") for rule in RULES]
CASES = {  # ranks, what is unusual about them, the machines
    "two": (2, {}, [[0, 1]]),
    "three": (3, {}, [[0, 1, 2]]),
    "four": (4, {}, [[0, 1, 2, 3]]),
    "two networks": (4, {"networks": [7, 8, 7, 8]}, [[0, 2], [1, 3]]),
    "nothing to lend": (3, {"without": [1]}, [[0, 2], [1]]),
    "no memory left": (2, {"full": [1]}, [[0], [1]]),
    "two hosts": (4, None, [[0, 2], [1, 3]]),
}


@contextlib.contextmanager
def two_hosts(function, folder):
    """Four ranks, on two hosts in turn: the pipes to them."""
    if reason := hosts.missing():
        pytest.skip(reason)
    path = os.pathsep.join(filter(None, sys.path))
    with contextlib.ExitStack() as stack:
        cluster, pipes = stack.enter_context(hosts.Hosts(2, ray=False)), []
        for rank in range(4):
            with Listener(str(folder / f"pipe-{rank}"), "AF_UNIX") as listener:
                cluster[rank % 2].start(
                    *(sys.executable, collective_ranks.__file__, function, rank, 4, folder),
                    env=os.environ | {"PYTHONPATH": path},
                )
                pipes.append(stack.enter_context(listener.accept()))
        yield pipes


EVERY_DAY = ("two networks", "no memory left")
OTHERS = [name for name in CASES if name not in EVERY_DAY]


@pytest.fixture(scope="module", params=[*EVERY_DAY, *slow(*OTHERS)])
def case(request, tmp_path_factory):
    """What all ranks say of every scene, and their machines."""
    ranks, unusual, machines = CASES[request.param]
    folder = tmp_path_factory.mktemp("group")
    if unusual is None:
        with two_hosts("scenes", folder) as pipes:
            return [pipe.recv() for pipe in pipes], machines
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        calls = [
            pool.submit(collective_ranks.scenes, rank, ranks, folder / "store", **unusual)
            for rank in range(ranks)
        ]
        return [call.result() for call in calls], machines


@pytest.mark.parametrize("rule", RULES)
def test_who_can_reach_each_other_is_one_machine(case, rule):
    """Then it has the others' memory, mapped, and nothing else of theirs."""
    said, machines = case
    for rank, one in enumerate(said):
        assert one[rule]["machines"] == machines
        assert one[rule]["groups"] == 0  # that torch knows of: no name that ranks could differ in
        mates = next(len(machine) for machine in machines if rank in machine)
        if rule == "average":  # the first: nothing of an earlier center is there
            assert one[rule]["files"] == (mates if mates > 1 else 0)


@pytest.mark.parametrize("scene", SCENES)
def test_the_center_is_the_same_to_the_bit(case, scene):
    said, _ = case
    nobody = "nan" in scene and len(said) == 2  # contributes to the second round
    for one in said:
        assert one[scene]["version"] == 4 - nobody
        for name, c in one[scene]["c"].items():
            assert c.dtype == VALUES[name].dtype
            np.testing.assert_array_equal(c, said[0][scene]["c"][name])


@pytest.mark.parametrize("scene", SCENES)
def test_it_is_the_center_of_ranks_that_stand_alone(case, scene):
    """But for the order in which they are added up."""
    said, _ = case
    for one in said:
        alone = one[f"alone {scene}"]
        assert alone["machines"] == [[rank] for rank in range(len(said))]
        for which in ("c", "x"):
            for name, value in one[scene][which].items():
                atol = 1e-5 if value.dtype == np.float32 else 1e-13
                np.testing.assert_allclose(value, alone[which][name], rtol=0, atol=atol)
                assert np.ptp(value) > 1  # it has moved


@pytest.mark.parametrize("rule", RULES)
def test_nan_stays_where_it_is(case, rule):
    """Ranks 0 and 1 have it in the second of four rounds; rank 0 is a speaker."""
    said, _ = case
    for rank, one in enumerate(said):
        first, wrong, *last = one[f"nan {rule}"]["said"]
        assert [first, *last] == [""] * 3
        assert ("Parameter 'd' of rank" in wrong) == (rank < 2)
        assert f"rank {rank} has NaN or Inf" in wrong or rank >= 2
        exchanges = [3 if other < 2 else 4 for other in range(len(said))]
        assert one[f"nan {rule}"]["exchanges"] == exchanges
        assert all(np.isfinite(c).all() for c in one[f"nan {rule}"]["c"].values())


def test_a_sum_that_overflows_is_taken_nowhere(case):
    said, _ = case
    for one in said:
        first, wrong, last = one["overflow"]["said"]
        assert (first, last) == ("", "")
        assert "'w' would overflow the center, which stays as it was" in wrong
        assert one["overflow"]["versions"] == [1, 1, 2]
        before, after, _ = one["overflow"]["values"]
        for name, c in after.items():
            np.testing.assert_array_equal(c, before[name])
        for ours, theirs in zip(
            one["overflow"]["values"], said[0]["overflow"]["values"], strict=True
        ):
            for name, c in ours.items():
                np.testing.assert_array_equal(c, theirs[name])


def end_in_a_round(pipes, who, how, where):
    """Let a rank end in the middle of a round; return the pipes of those that are left."""
    for rank, pipe in enumerate(pipes):
        pipe.send((how if rank == who else None, where))
    return [pipe for rank, pipe in enumerate(pipes) if rank != who]


@pytest.mark.parametrize(
    ("who", "how", "where"),
    [
        (0, "killed", "add"),
        pytest.param(2, "killed", "add", marks=pytest.mark.slow),
        pytest.param(2, "killed", "close_round", marks=pytest.mark.slow),
        pytest.param(1, "interrupted", "add", marks=pytest.mark.slow),
    ],
)
def test_who_ends_in_the_middle_of_a_round_is_named(start, tmp_path, who, how, where):
    store = tmp_path / "store"
    lives = [start(collective_ranks.dying, rank, 3, store, 8) for rank in range(3)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == [[[0, 1, 2]]] * 3
    left = end_in_a_round(pipes, who, how, where)
    if how == "interrupted":  # it can do nothing more, and waits for nobody
        assert "has failed or was closed" in pipes[who].recv()
        assert pipes[who].recv() == [True, True]
    lives[who][0].join()
    for pipe in left:
        assert f"missing: rank {who}." in (said := pipe.recv()), said
        assert "has failed or was closed" in pipe.recv()
        assert pipe.recv() == [where == "add"] * 2  # else the round has been taken


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("where", ["add", "close_round"])
def test_who_ends_on_one_of_two_hosts_is_named(tmp_path, who, where):
    """Those of the other host wait for its speaker only, or have gone on to the next round."""
    with two_hosts("dying", tmp_path) as pipes:
        assert [pipe.recv() for pipe in pipes] == [[[0, 2], [1, 3]]] * 4
        for rank, pipe in enumerate(end_in_a_round(pipes, who, "killed", where)):
            said = pipe.recv()
            if said == "a round":
                assert where == "close_round"
                said = pipe.recv()
            assert f"missing: rank {who}." in said, (rank, said)
            assert said.count("Torch says") <= 1, said


def test_who_reads_sees_one_round(start, tmp_path):
    """A thread of rank 1 reads slowly, and the others may not go on writing there meanwhile."""
    lives = [start(collective_ranks.reading, rank, 2, tmp_path / "store") for rank in range(2)]
    for rank, (_, pipe) in enumerate(lives):
        machines, changes = pipe.recv()
        assert machines == [[0, 1]]
        assert bool(changes) == (rank == 1)
        assert not any(changes)


@pytest.mark.slow
def test_a_center_that_is_closed_in_a_round_takes_no_half_sum(start, tmp_path):
    folder = tmp_path / "run"
    given = 2, tmp_path / "store", folder
    lives = [start(collective_ranks.closing, rank, *given) for rank in range(2)]
    for rank, (_, pipe) in enumerate(lives):
        said, version, values = pipe.recv()
        assert len(said) == 1
        assert "has failed or was closed" in said[0] or rank == 1
        assert (version, values) == (1, [[1.0], [1.0]])
    for process, _ in lives:
        process.join()
    assert checkpoint.describe(folder / "checkpoint.safetensors").version == 1


def test_a_child_of_a_rank_is_refused(start, tmp_path):
    """Others write to the memory that it has of its parent."""
    lives = [start(collective_ranks.forking, rank, 2, tmp_path / "store") for rank in range(2)]
    said = [pipe.recv() for _, pipe in lives]
    assert [len(texts) for texts in said] == [2, 0]
    assert all("is used in its child" in text for text in said[0])


@pytest.mark.slow
def test_a_link_may_be_slower_than_a_rank_waits_for_another(start, tmp_path):
    given = 3, tmp_path / "store", 4.0
    lives = [start(collective_ranks.waiting, rank, *given) for rank in range(3)]
    assert [pipe.recv() for _, pipe in lives] == [([[0, 1], [2]], [[1.0], [1.0]])] * 3


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n)))
def test_the_machines_are_of_ranks_that_all_reach_each_other(reached):
    machines = divide([sorted(whom) for whom in reached])
    assert sorted(rank for machine in machines for rank in machine) == list(range(len(reached)))
    for machine in machines:
        assert machine == sorted(machine)
        for rank in machine:
            assert set(machine) - {rank} <= reached[rank]
