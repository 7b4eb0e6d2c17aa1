"""Checkpoints: what is saved goes on as if nothing had happened."""

from dataclasses import replace

import numpy as np
import pytest
from centers import IN_ROUNDS, LOCK_FREE, RULES, each, exchange_all, on
from safetensors.numpy import load_file

from springline.center import CheckpointError, Layout
from springline.rules import AsyncDiLoCo, Momentum, Nesterov

VALUES = {"w": np.ones((3, 2), np.float32), "d": np.arange(4.0), "s": np.array(1, np.float32)}
BUFFERS = {"mean": np.zeros(3, np.float32), "none": np.zeros(0)}
NESTEROV = ("MeanOfPseudoGradients-nesterov",)


def train(worker, rng):
    """A step with random gradients; `x` follows them, buffers too."""
    gradients = {n: rng.standard_normal(v.shape).astype(v.dtype) for n, v in VALUES.items()}
    worker.observe(gradients)
    for name, g in gradients.items():
        worker.parameters[name] -= 0.1 * g
    worker.buffers["mean"] += gradients["s"]
    worker.step()


def contents(center, path):
    center.save(path)
    return load_file(path)


@pytest.mark.parametrize("use_locking", [True, False])
@each(*(name for name in RULES if "Stale" not in name), fixed=IN_ROUNDS)  # who joins is fresh
def test_save_load_step_equals_step(place, name, use_locking, tmp_path, together):
    rule = RULES[name](workers=2, period=2)
    if isinstance(rule, AsyncDiLoCo):
        rule = replace(rule, staleness=None)  # who joins is fresh
    making = {"buffers": BUFFERS, "use_locking": use_locking or name not in LOCK_FREE}
    path = tmp_path / "center.safetensors"

    def steps(workers, n, seed):
        """In turn, so that two runs do the same; together where they wait for each other."""
        rngs = [np.random.default_rng([seed, w.rank]) for w in workers]
        calls = [lambda w=w, r=r: train(w, r) for w, r in zip(workers, rngs, strict=True)]
        for _ in range(n):
            if workers[0].in_rounds:
                together(*calls)
            else:
                for call in calls:
                    call()

    workers = place.workers(VALUES, rule, **making)
    steps(workers, 6, seed=1)
    rounds = workers[0].in_rounds
    if not rounds:  # ranks need not have come equally far
        steps(workers[1:], 2, seed=2)
    workers[0].center.save(path)
    zeros = {n: np.zeros_like(v) for n, v in VALUES.items()}
    restored = place.other().workers(zeros, rule, restore=path, **making)
    assert restored[0].center.version == workers[0].center.version > 0
    assert [w.start_step for w in restored] == [6, 6 if rounds else 8]
    np.testing.assert_array_equal(restored[0].center.read(), workers[0].center.read())

    for old, new in zip(workers, restored, strict=True):
        new.local.x[:] = old.local.x
        if old.local.base is not None:
            new.local.base[:] = old.local.base
    for group in (workers, restored):
        steps(group, 4, seed=3)
    assert restored[0].center.version == workers[0].center.version
    ours, theirs = (contents(group[0].center, path) for group in (workers, restored))
    assert ours.keys() == theirs.keys()
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key])


def takes_what_is_published(worker, given):
    """Whether it goes on from what others were given, from `x` to its next message."""
    np.testing.assert_array_equal(worker.local.x, given)
    np.testing.assert_array_equal(worker.local.base, given)


@each("Pushes-ahead", "MeanOfPseudoGradients-ahead", fixed=("MeanOfPseudoGradients-ahead",))
def test_who_joins_or_is_restored_takes_what_is_published(place, name, tmp_path, together):
    """An outer optimizer may give workers another point than `c`, which is saved and read."""
    rule = RULES[name](workers=2, period=1)
    workers = place.workers(VALUES, rule, buffers=BUFFERS)
    for worker in workers:
        worker.parameters["d"] -= 1.0
        worker.buffers["mean"] += 3
    exchange_all(workers, together)
    center, given = workers[1].center, workers[1].local.x.copy()
    assert (workers[1].parameters["d"] != center.values()["d"]).all()
    if place.joinable:
        workers[0].member.leave()
        takes_what_is_published(place.worker(VALUES, rule, 0, buffers=BUFFERS), given)
    workers[1].take_center()
    takes_what_is_published(workers[1], given)
    path = tmp_path / "center.safetensors"
    center.save(path)
    for worker in place.other().workers(VALUES, rule, buffers=BUFFERS, restore=path):
        takes_what_is_published(worker, given)
        np.testing.assert_array_equal(worker.center.read(), center.read())


@each("agn-momentum", "Pushes-momentum", *NESTEROV, fixed=NESTEROV)
def test_the_state_of_another_outer_optimizer_is_refused(place, name, tmp_path):
    """Also if it has the same shapes: the numbers mean something else."""
    path = tmp_path / "center.safetensors"
    theirs = RULES[name]()
    place.make(Layout.of(VALUES), theirs, VALUES).save(path)
    kind, μ = theirs.outer.kind, theirs.outer.momentum
    like_it = (Momentum if kind == "nesterov" else Nesterov)(0.5, μ)
    for other, words in (
        (like_it, f"outer optimizer: kind='{kind}', wanted '{like_it.kind}'"),
        (replace(theirs.outer, momentum=0.25), f"outer optimizer: momentum={μ}, wanted 0.25"),
    ):
        ours = replace(theirs, outer=other)
        with pytest.raises(CheckpointError, match=words):
            place.other().make(Layout.of(VALUES), ours, VALUES, restore=path)
    faster = replace(theirs, outer=replace(theirs.outer, learning_rate=0.125))
    place.other().make(Layout.of(VALUES), faster, VALUES, restore=path)


@each("elastic", "average")
def test_progress_is_kept_per_rank(place, name):
    rule = RULES[name](workers=2, period=2)
    worker = place.worker(VALUES, rule, 1, buffers=BUFFERS)
    rng = np.random.default_rng(0)
    for _ in range(7):
        train(worker, rng)
    zero, one = worker.center.progress()
    assert (zero.steps, zero.exchanges, zero.seconds) == (0, 0, 0)
    assert (one.steps, one.exchanges) == (6, 3)
    assert one.seconds > 0
    worker.member.leave()
    again = place.worker(VALUES, rule, 1, buffers=BUFFERS)
    assert again.start_step == 6
    for _ in range(2):
        train(again, rng)
    assert again.center.progress()[1].steps == 8


@on("asynchronous")
def test_a_center_is_joined_and_never_restored_over(place, tmp_path):
    rule = RULES["elastic"](workers=2)
    path = tmp_path / "center.safetensors"
    ones = {n: np.ones_like(v) for n, v in VALUES.items()}
    place.make(Layout.of(ones), rule, ones).save(path)
    other = place.other()
    other.worker(VALUES, rule, 0)
    joined = other.worker(VALUES, rule, 1, restore=path)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(joined.parameters[name], value)


@on("asynchronous")
def test_a_checkpoint_of_another_model_is_refused_with_every_difference(place, tmp_path):
    path = tmp_path / "center.safetensors"
    theirs = {"w": np.zeros(2, np.float32), "b": np.zeros(2, np.float32), "c": np.zeros(2)}
    place.make(Layout.of(theirs), RULES["agn-adam"](), theirs).save(path)
    ours = {"w": np.zeros(3, np.float32), "v": np.zeros(1), "c": np.zeros(2, np.float32)}
    with pytest.raises(CheckpointError) as refused:
        place.other().make(Layout.of(ours), RULES["agn-momentum"](), ours, restore=path)
    for words in (
        "missing: center/v;",
        "missing: outer/momentum/w;",
        "extra: center/b;",
        "extra: outer/t/c;",
        "center/w: shape (2,), wanted (3,)",
        "center/c: dtype float64, wanted float32",
        "Nothing was restored",
    ):
        assert words in str(refused.value)
