"""The collective center: ranks are threads here, each with a gloo backend of its own."""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar

import numpy as np
import pytest
import torch.distributed as dist

from own_rules import MeanOfPseudoGradients
from springline import AGN, AsyncDiLoCo, DiLoCo, ElasticAverage, ModelAverage, Worker
from springline.center import (
    CenterError,
    Layout,
    LayoutError,
    NonFiniteError,
    RankError,
    RoundTimeoutError,
    SettingsError,
    checkpoint,
)
from springline.center.collective import Collective, CollectiveCenter
from springline.center.collective.group import Group
from springline.rules import SGD

RULES = {"average": ModelAverage, "elastic": ElasticAverage}
VALUES = {"w": np.arange(300_000, dtype=np.float32), "b": np.ones(5, np.float32)}


class Counting:
    """A backend that counts its all-reduces."""

    def __init__(self, backend):
        self.backend = backend
        self.elements = []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def allreduce(self, tensors):
        self.elements.append([tensor.numel() for tensor in tensors])
        return self.backend.allreduce(tensors)


@pytest.fixture
def ranks(together):
    """`ranks(call, n)` returns `call(rank, backend)` of n threads with a process group."""

    def ranks(call, workers, seconds=30.0):
        store = dist.HashStore()

        def one(rank):
            timeout = timedelta(seconds=seconds)
            return call(rank, Counting(dist.ProcessGroupGloo(store, rank, workers, timeout)))

        return together(*[lambda r=r: one(r) for r in range(workers)])

    return ranks


def make(rank, backend, rule, values=VALUES, buffers=None, **options):
    layout, both = Layout.of(values, buffers), {**values, **(buffers or {})}
    center = CollectiveCenter(Group(backend), layout, rule, both, **options)
    return Worker(values, rule, center, rank, buffers=buffers)


def errors(ranks, call, workers=3):
    """The error of every rank."""

    def refused(rank, backend):
        with pytest.raises(CenterError) as error:
            call(rank, backend)
        return error.value

    return ranks(refused, workers)


@dataclass(frozen=True, kw_only=True)
class Seen(MeanOfPseudoGradients):
    """A rule that adopts the center from before the round: only process groups take it."""

    name: ClassVar[str] = "seen"
    adopts_seen: ClassVar[bool] = True


def test_a_rule_that_only_a_group_takes_is_not_refused_elsewhere(ranks):
    def train(rank, backend):
        worker = make(rank, backend, Seen(workers=2, period=1, outer=SGD(1.0)))
        for _ in range(5):
            worker.parameters["w"] += 1
            worker.step()
        return worker.parameters["w"][0], worker.center.values()["w"][0]

    assert ranks(train, 2) == [(4, 5)] * 2


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_center_is_the_same_to_the_bit(ranks, name, workers):
    def train(rank, backend):
        rng = np.random.default_rng(rank)
        worker = make(rank, backend, RULES[name](workers=workers, period=1))
        for _ in range(5):
            for x in worker.parameters.values():
                x += rng.standard_normal(x.shape).astype(np.float32)
            worker.step()
        return worker.center.read(), worker.center.version

    first, *others = ranks(train, workers)
    assert first[1] == 5
    for center, version in others:
        assert version == 5
        np.testing.assert_array_equal(center, first[0])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("doubles", "reduces"), [(False, 1), (True, 2)])
def test_an_exchange_is_one_all_reduce_of_each_dtype(ranks, name, doubles, reduces):
    buffers = {"mean": np.zeros(7, np.float32)}
    values = VALUES | ({"d": np.zeros(9)} if doubles else {})

    def train(rank, backend):
        worker = make(rank, backend, RULES[name](workers=2, period=1), values, buffers)
        worker.begin()
        backend.elements.clear()
        worker.step()
        return backend.elements

    for elements in ranks(train, 2):
        assert len(elements) == reduces
        assert sum(map(sum, elements)) <= 300_000 + 5 + 7 + 9 + 4 * 64


def test_all_take_rank_0s_values(ranks):
    def values(rank, backend):
        mine = {"w": np.full(3, rank % 2, np.float32)}  # rank 2 has rank 0's
        return make(rank, backend, ModelAverage(workers=3), mine).parameters["w"].tolist()

    assert ranks(values, 3) == [[0, 0, 0]] * 3


def test_another_model_is_refused_on_all_ranks(ranks):
    def other(rank, backend):
        values = VALUES | ({"b": np.ones(6, np.float32)} if rank else {})
        make(rank, backend, ModelAverage(workers=3), values)

    for error in errors(ranks, other):
        assert type(error) is LayoutError
        assert "model of rank 1 differs from rank 0's" in str(error)
        assert "'b' has shape (5,) in the center, (6,) in the worker" in str(error)


def test_other_settings_are_refused_on_all_ranks(ranks):
    def other(rank, backend):
        make(rank, backend, ElasticAverage(workers=3, period=7 if rank == 2 else 8))

    for error in errors(ranks, other):
        assert type(error) is SettingsError
        assert "Rank 2 comes with period=7, rank 0 with period=8" in str(error)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (AGN(workers=2, outer=SGD(0.1)), "'agn' accumulates gradients"),
        (AsyncDiLoCo(workers=2), "'async_diloco' takes a step with every worker's message"),
    ],
)
def test_rules_without_rounds_are_refused_with_the_centers_that_take_them(ranks, rule, why):
    def without_rounds(rank, backend):
        make(rank, backend, rule)

    for error in errors(ranks, without_rounds, 2):
        assert type(error) is SettingsError
        assert why in str(error)
        assert "shared center takes every rule" in str(error)


def test_what_only_rank_0_finds_is_told_to_all(ranks, tmp_path):
    bad = VALUES | {"b": np.full(5, np.nan, np.float32)}

    def nan(rank, backend):
        make(rank, backend, ModelAverage(workers=2), VALUES if rank else bad)

    zero, one = errors(ranks, nan, 2)
    assert type(zero) is NonFiniteError
    assert "Parameter 'b' has NaN or Inf" in str(zero)
    assert str(one) == f"Rank 0 could not start: {zero}"

    (tmp_path / "checkpoint.safetensors").write_bytes(b"not much")

    def damaged(rank, backend):
        path = tmp_path / "checkpoint.safetensors"
        make(rank, backend, ModelAverage(workers=2), restore=path if rank == 0 else None)

    zero, one = errors(ranks, damaged, 2)
    assert "cut short or damaged" in str(zero)
    assert str(one) == f"Rank 0 could not start: {zero}"


def test_the_rule_is_for_as_many_as_there_are(ranks):
    for error in errors(ranks, lambda r, b: make(r, b, ModelAverage(workers=3)), 2):
        assert "workers=3, but the process group has 2 ranks" in str(error)


def test_a_rank_is_that_of_the_group_and_used_once(ranks):
    def join(rank, backend):
        rule = ModelAverage(workers=2)
        center = CollectiveCenter(Group(backend), Layout.of(VALUES), rule, VALUES)
        with pytest.raises(RankError, match=rf"rank {rank} of the 2.*Received: rank={1 - rank}"):
            center.join(1 - rank, rule)
        center.join(rank, rule)
        with pytest.raises(RankError, match="has joined already"):
            center.join(rank, rule)
        return center.members()

    assert ranks(join, 2) == [[0, 1]] * 2


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_with_nan_sends_nothing(ranks, bad):
    """The others' round goes on without it."""
    start = {"w": np.zeros(200_000, np.float32)}

    def train(rank, backend):
        rule = ElasticAverage(workers=2, period=1, moving_rate=0.25)
        worker = make(rank, backend, rule, start)
        x = worker.parameters["w"]
        x += 4
        if rank == bad:
            x[100_000] = np.inf
            with pytest.raises(NonFiniteError, match=rf"Parameter 'w' of rank {bad} has NaN or"):
                worker.step()
        else:
            worker.step()
        worker.member.leave()
        return x, worker.center.values()["w"], worker.center.progress()

    (x0, c, progress), (x1, other, _) = ranks(train, 2)
    np.testing.assert_array_equal(c, other)
    assert [rank.exchanges for rank in progress] == [bad == 1, bad == 0]
    ours, theirs = (x1, x0) if bad == 0 else (x0, x1)
    assert (ours == 3).all()
    assert (c == 1).all()
    assert (np.delete(theirs, 100_000) == 4).all()


def test_a_rank_that_had_nan_takes_the_center_before_it_contributes_again(ranks):
    """What it has is measured from the center before the round that it had no part in."""

    def train(rank, backend):
        rule = DiLoCo(workers=2, period=1, outer=SGD(1.0))
        worker, found = make(rank, backend, rule, {"w": np.zeros(4, np.float32)}), []
        for step in range(3):
            worker.parameters["w"] += 1 + 2 * rank
            if rank and not step:
                worker.parameters["w"][1] = np.nan
                with pytest.raises(NonFiniteError):
                    worker.step()
                worker.parameters["w"][:] = 100
            else:
                worker.step()
            found.append(worker.center.values()["w"].tolist())
        worker.finish()
        return found, worker.parameters["w"].tolist()

    for found, x in ranks(train, 2):
        assert found == [[1.0] * 4, [2.0] * 4, [4.0] * 4]
        assert x == [4.0] * 4


def test_a_sum_that_overflows_is_refused_on_all_ranks(ranks):
    with pytest.warns(match="above 1"):
        rule = ElasticAverage(workers=3, period=1, moving_rate=1.0)
    start = {"u": np.ones(1, np.float32), "v": np.zeros(1, np.float32)}

    def train(rank, backend):
        worker = make(rank, backend, rule, start)
        worker.parameters["v"][:] = 1e38
        worker.step()
        assert worker.center.values()["v"] == np.float32(3e38)  # large, and taken
        worker.parameters["v"][:] = 3.4e38
        with pytest.raises(NonFiniteError, match=r"'v' would overflow the center.*on all ranks"):
            worker.step()
        assert worker.center.values()["v"] == np.float32(3e38)
        worker.take_center()
        worker.step()
        return worker.center.version

    assert ranks(train, 3) == [3, 3, 3]


def test_a_rank_that_is_too_far_from_the_center_raises_alone(ranks):
    """Its difference to the center overflows, the mean's does not."""
    rule = ElasticAverage(workers=2, period=1, moving_rate=0.5)

    def train(rank, backend):
        worker = make(rank, backend, rule, {"v": np.full(3, -2e38, np.float32)})
        worker.parameters["v"][:] = -3e38 if rank else 3e38
        if rank == 0:
            with pytest.raises(NonFiniteError, match="Rank 0 is too far from the center to adopt"):
                worker.step()
            worker.take_center()
        else:
            worker.step()
        worker.step()
        return worker.center.version, worker.center.values()["v"].tolist()

    one, two = ranks(train, 2)
    assert one == two
    assert one[0] == 2


@pytest.mark.parametrize("name", RULES)
def test_who_has_finished_is_not_in_the_mean(ranks, name):
    """Rank k makes k rounds; all return together, with the same center."""

    def train(rank, backend):
        rule = RULES[name](workers=3, period=1)
        worker = make(rank, backend, rule, {"v": np.zeros(2, np.float32)})
        seen = []
        for k in range(rank):
            worker.parameters["v"][:] = 10 * rank + k
            worker.step()
            seen.append((worker.parameters["v"].tolist()[0], worker.center.members()))
        worker.finish()
        worker.finish()
        return seen, worker.center.values()["v"].tolist(), worker.center.version

    (none, *ends), one, two = ranks(train, 3)
    assert none == []
    assert ends == list(one[1:]) == list(two[1:])
    assert ends[1] == 2
    if name == "average":
        assert [value for value, _ in one[0]] == [15]
        assert [value for value, _ in two[0]] == [15, 21]
        assert ends[0] == [21, 21]
    assert [members for _, members in two[0]] == [[1, 2], [2]]


def test_who_does_not_come_is_noticed(ranks):
    def train(rank, backend):
        worker = make(rank, backend, ModelAverage(workers=2, period=1))
        if rank == 0:
            with pytest.raises(RoundTimeoutError, match=r"Rank 0 waited for the first step; which"):
                worker.step()
            with pytest.raises(CenterError, match="has failed or was closed"):
                worker.step()
            worker.finish()  # without waiting for anybody
            np.testing.assert_array_equal(worker.center.values()["w"], VALUES["w"])
        return True

    assert ranks(train, 2, seconds=0.3) == [True, True]


def test_checkpoints_are_rank_0s_and_a_new_group_goes_on(ranks, tmp_path):
    def train(steps, workers):
        def call(rank, backend):
            rule = ModelAverage(workers=workers, period=2)
            options = {"directory": tmp_path / f"of-{rank}", "save_every": 0}
            worker = make(rank, backend, rule, **options)
            start = worker.start_step
            for _ in range(start, steps):
                worker.parameters["b"] += 1
                worker.step()
            worker.finish()
            return start, worker.center.version, worker.parameters["b"].tolist()[0]

        return ranks(call, workers)

    assert train(5, 2) == [(0, 3, 6)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["of-0"]  # the others need none
    saved = checkpoint.describe(tmp_path / "of-0" / "checkpoint.safetensors")
    assert (saved.version, saved.steps) == (3, [5, 5])
    assert train(9, 2) == [(5, 5, 10)] * 2
    assert train(11, 3) == [(9, 6, 12)] * 3  # one more rank: it is as far as the others


def test_two_groups_do_not_keep_checkpoints_in_one_directory(ranks, tmp_path, monkeypatch, caplog):
    rule = ModelAverage(workers=2, period=1)

    def call(rank, backend):
        return make(rank, backend, rule, directory=tmp_path / "run")

    first = ranks(call, 2)
    with pytest.raises(CenterError, match="Another group keeps its checkpoints in"):
        ranks(call, 2)
    monkeypatch.setattr("platform.node", lambda: "another")
    assert len(ranks(call, 2)) == 2  # the other machine may be dead
    assert "unless that one is dead" in caplog.text
    monkeypatch.undo()
    for worker in first:
        worker.center.close()
    caplog.clear()
    assert len(ranks(call, 2)) == 2
    assert "Another group" not in caplog.text


def test_a_group_does_not_go_on_with_another_rule(ranks, tmp_path):
    def train(rule):
        def call(rank, backend):
            worker = make(rank, backend, rule, directory=tmp_path if rank == 0 else None)
            worker.exchange()
            worker.finish()

        return call

    rule = ElasticAverage(workers=2, period=2, moving_rate=0.1)
    ranks(train(rule), 2)
    for other, difference in (
        (
            ModelAverage(workers=2, period=2),
            "rule='elastic', this worker comes with rule='average'",
        ),
        (replace(rule, period=3), "period=2, this worker comes with period=3"),
        (replace(rule, moving_rate=0.2), "moving_rate=0.1, this worker comes with moving_rate=0.2"),
    ):
        zero, one = errors(ranks, train(other), 2)
        assert difference in str(zero)
        assert str(one) == f"Rank 0 could not start: {zero}"
    ranks(train(replace(rule, workers=3, moving_rate=0.3)), 3)  # the group has grown


def test_steps_are_exact_beyond_what_a_float32_counts(ranks):
    def train(rank, backend):
        worker = make(rank, backend, ModelAverage(workers=2, period=1))
        worker.start_step = 2**31 + 12_345 + rank
        worker.step()
        return [rank.steps for rank in worker.center.progress()]

    assert ranks(train, 2) == [[2**31 + 12_346, 2**31 + 12_347]] * 2


def test_a_group_on_another_device_is_staged(ranks):
    """As for NCCL, but that the "device" is a second piece of memory here."""

    def train(rank, backend):
        worker = make(rank, backend, ElasticAverage(workers=2, period=1, moving_rate=0.5))
        replica = worker.center.replica
        replica._staged = [[t.clone() for t in tensors] for tensors in replica._tensors]
        for _ in range(2):
            worker.parameters["b"] += 1 + rank
            worker.step()
        return worker.parameters["b"].tolist()[0], worker.center.values()["b"].tolist()[0]

    assert ranks(train, 2) == [(2.5, 3.25), (3.25, 3.25)]


@pytest.mark.parametrize(
    ("arguments", "timeout", "words"),
    [
        ({"group": None}, None, r"`group` must be a process group.*init_process_group.*NoneType"),
        ({"group": -100}, None, r"that this process is in.*int -100"),
        ({"save_every": -1}, None, r"`save_every` must be seconds >= 0.*save_every=-1"),
        ({}, 0, r"`timeout` must be seconds > 0.*Received: 0"),
    ],
)
def test_bad_arguments_are_refused(ranks, arguments, timeout, words):
    def refused(rank, backend):
        with pytest.raises((TypeError, ValueError), match=words):
            Collective(**{"group": backend} | arguments)(
                Layout.of(VALUES), ModelAverage(), VALUES, timeout
            )
        return True

    assert ranks(refused, 1) == [True]


def test_a_directory_that_cannot_be_made_is_refused_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").touch()

    def refused(rank, backend):
        make(rank, backend, ModelAverage(workers=2), directory=tmp_path / "file" / "center")

    zero, one = errors(ranks, refused, 2)
    assert "Cannot keep checkpoints in" in str(zero)
    assert str(one) == f"Rank 0 could not start: {zero}"
