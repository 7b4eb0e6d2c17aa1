"""Ranks of a process group: real processes, on one host or two, some of them killed."""

import contextlib
import os
import sys
from multiprocessing.connection import Listener

import collective_ranks
import numpy as np
import pytest
from collective_ranks import RULES, VALUES

import forks
import hosts
from marks import slow
from springline.center import checkpoint
from springline.rules import SGD
from springline.rules.reference import Twin

SCENES = [f"{nan}{rule}" for nan in ("", "nan ") for rule in RULES]


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


@pytest.fixture(scope="module", params=[3, *slow(2, 4, "two hosts")])
def said(request, tmp_path_factory):
    """What all ranks say of every scene."""
    folder = tmp_path_factory.mktemp("group")
    if request.param == "two hosts":
        with two_hosts("scenes", folder) as pipes:
            return [pipe.recv() for pipe in pipes]
    ranks = request.param
    with forks.pool(ranks) as pool:
        calls = [
            pool.submit(collective_ranks.scenes, rank, ranks, folder / "store")
            for rank in range(ranks)
        ]
        return [call.result() for call in calls]


@pytest.mark.parametrize("scene", SCENES)
def test_the_center_is_the_same_to_the_bit(said, scene):
    nobody = "nan" in scene and len(said) == 2  # contributes to the second round
    for one in said:
        assert one[scene]["version"] == 4 - nobody
        assert one[scene]["groups"] == 0  # that torch knows of: no name that ranks could differ in
        for name, c in one[scene]["c"].items():
            assert c.dtype == VALUES[name].dtype
            np.testing.assert_array_equal(c, said[0][scene]["c"][name])


@pytest.mark.parametrize("rule", RULES)
def test_training_follows_the_twin(said, rule):
    moves = [np.random.default_rng(rank) for rank in range(len(said))]

    def gradient(rank, step, x):
        return {
            name: -moves[rank].standard_normal(v.shape).astype(v.dtype) for name, v in x.items()
        }

    rule_ = RULES[rule](workers=len(said), period=1)
    twin = Twin(rule_, VALUES, SGD(1.0), gradient, together=True)
    list(twin.run([range(len(said))] * 4))
    for one, worker in zip(said, twin.workers, strict=True):
        for found, expected in ((one[rule]["c"], twin.c), (one[rule]["x"], worker.x)):
            for name, value in found.items():
                atol = 1e-5 if value.dtype == np.float32 else 1e-13
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=atol)
                assert np.ptp(value) > 1  # it has moved


@pytest.mark.parametrize("rule", RULES)
def test_nan_stays_where_it_is(said, rule):
    """Ranks 0 and 1 have it in the second of four rounds."""
    for rank, one in enumerate(said):
        first, wrong, *last = one[f"nan {rule}"]["said"]
        assert [first, *last] == [""] * 3
        assert ("Parameter 'd' of rank" in wrong) == (rank < 2)
        assert f"rank {rank} has NaN or Inf" in wrong or rank >= 2
        exchanges = [3 if other < 2 else 4 for other in range(len(said))]
        assert one[f"nan {rule}"]["exchanges"] == exchanges
        assert all(np.isfinite(c).all() for c in one[f"nan {rule}"]["c"].values())


def test_a_block_that_overflows_is_taken_nowhere(said):
    for one in said:
        first, wrong, last = one["overflow"]["said"]
        assert (first, last) == ("", "")
        assert "'w' would overflow the center" in wrong
        assert one["overflow"]["versions"] == [1, 2, 3]
        assert all(np.isfinite(c).all() for c in one["overflow"]["values"][1].values())
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


def failure(pipe, where):
    """What a rank says that fails, and whether it took the round that another has ended in."""
    said = pipe.recv()
    taken = said == "a round"
    assert not taken or where == "close_round"  # the sum was there
    return pipe.recv() if taken else said, taken


@pytest.mark.parametrize(
    ("who", "how", "where"),
    [
        pytest.param(0, "killed", "add_up", marks=pytest.mark.slow),
        pytest.param(2, "killed", "add_up", marks=pytest.mark.slow),
        pytest.param(2, "killed", "close_round", marks=pytest.mark.slow),
        pytest.param(1, "interrupted", "add_up", marks=pytest.mark.slow),
    ],
)
def test_who_ends_in_the_middle_of_a_round_is_named(start, tmp_path, who, how, where):
    store = tmp_path / "store"
    lives = [start(collective_ranks.dying, rank, 3, store, 8) for rank in range(3)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * 3
    left = end_in_a_round(pipes, who, how, where)
    if how == "interrupted":  # it can do nothing more, and waits for nobody
        assert "has failed or was closed" in pipes[who].recv()
        assert pipes[who].recv() == [True, True]
    lives[who][0].join()
    for pipe in left:
        said, taken = failure(pipe, where)
        assert f"missing: rank {who}." in said, said
        assert "has failed or was closed" in pipe.recv()
        assert pipe.recv() == [not taken] * 2  # is the center what it was


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("where", ["add_up", "close_round"])
def test_who_ends_on_one_of_two_hosts_is_named(tmp_path, who, where):
    with two_hosts("dying", tmp_path) as pipes:
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 4
        for rank, pipe in enumerate(end_in_a_round(pipes, who, "killed", where)):
            said, _ = failure(pipe, where)
            assert f"missing: rank {who}." in said, (rank, said)
            assert said.count("Torch says") <= 1, said


def test_who_reads_sees_one_round(start, tmp_path):
    """A thread of rank 1 reads slowly, and its rounds wait for that."""
    lives = [start(collective_ranks.reading, rank, 2, tmp_path / "store") for rank in range(2)]
    for rank, (_, pipe) in enumerate(lives):
        changes = pipe.recv()
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
    lives = [start(collective_ranks.forking, rank, 2, tmp_path / "store") for rank in range(2)]
    said = [pipe.recv() for _, pipe in lives]
    assert [len(texts) for texts in said] == [2, 0]
    assert all("is used in its child" in text for text in said[0])
