"""A step that was ready and not in place is finished by whoever takes the lock next."""

import threading

import numpy as np
import pytest

from own_rules import EveryFourth, MeanOfPseudoGradients, Pushes, Rolling
from springline import SharedCenter, Worker
from springline.center import RoundTimeoutError, SettingsError, checkpoint
from springline.center.journal import Journal
from springline.center.locks import SHARD
from springline.rules import AGN, SGD, Momentum
from springline.rules.outer import Replace

VALUES = {"v": np.zeros(1000, np.float32), "w": np.zeros(5)}  # two shards of a block each


@pytest.mark.parametrize(
    "rule",
    [Pushes(period=1, outer=EveryFourth()), MeanOfPseudoGradients(period=1, outer=Rolling())],
)
def test_what_a_killed_process_left_half_copied_is_finished(directory, rule, monkeypatch):
    worker = Worker(VALUES, rule, directory)

    def push():
        for x in worker.parameters.values():
            x -= 1
        worker.exchange()

    push()
    finish = Journal.finish

    def cut_short(journal, shard):
        """Mark it ready, and die: each shard has a step that is not in place."""
        if not journal._heads[shard][0]:
            finish(journal, shard)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", cut_short)
        push()
        c = worker.center.layout.views(worker.center.memory.center)
        assert (c["w"] == rule.outer.after(1)).all()
    with SharedCenter.open(directory) as other:
        assert (other.values()["w"] == rule.outer.after(2)).all()
        found = other.memory.state_of(other.plan)
    worker.center.close()
    assert all((np.unique(arrays[k]).size == 1) for arrays in found.values() for k in arrays)


def test_only_steps_that_need_it_have_a_journal(directory):
    for rule, journaled in (
        (Pushes(outer=SGD(0.1)), False),
        (Pushes(outer=Momentum(0.1)), True),
        (MeanOfPseudoGradients(outer=Replace()), False),
        (MeanOfPseudoGradients(outer=SGD(0.1)), True),
    ):
        assert Worker(VALUES, rule).center.plan.journaled == journaled


def test_steps_of_a_round_that_depend_on_the_center_need_locks():
    with pytest.raises(SettingsError, match="'sgd' must take its steps one at a time"):
        Worker(VALUES, MeanOfPseudoGradients(outer=SGD(0.1)), use_locking=False)


def test_a_round_that_timed_out_after_it_closed_is_not_contributed_to_twice():
    rule = MeanOfPseudoGradients(period=1, outer=SGD(1.0))
    worker = Worker(VALUES, rule, timeout=0.2)
    worker.parameters["w"] += 1
    assert worker.center.locks.try_acquire(SHARD)  # as a stopped process keeps it
    with pytest.raises(RoundTimeoutError):
        worker.step()
    worker.center.locks.release(SHARD)
    worker.exchange()
    worker.parameters["w"] += 1
    worker.step()
    assert worker.center.values()["w"].tolist() == [2.0] * 5


def test_a_checkpoint_has_the_state_of_the_steps_that_its_center_has(directory):
    """Element by element, of a parameter in several shards, while a worker exchanges."""
    rule = AGN(
        period=1, outer=Momentum(1.0, momentum=0.0), fixed_rate=True
    )  # `m` is the last gradient
    with Worker({"w": np.zeros(2_000_000, np.float32)}, rule, directory) as worker:
        assert len(worker.center.plan.shards) > 1
        begun, saved, wrong = threading.Event(), [], []

        def look():
            for _ in range(8):
                begun.wait()
                worker.center.save(directory.parent / "now")
                center = np.zeros_like(worker.center.memory.center)
                state = np.zeros_like(worker.center.memory.state)
                checkpoint.read(directory.parent / "now", worker.center.plan, center, state)
                c, m = center.view(np.float32)[:2_000_000], state.view(np.float32)[:2_000_000]
                saved.append(c[0])
                wrong.append(np.count_nonzero(c != -m * (m + 1) / 2))

        thread = threading.Thread(target=look)
        thread.start()
        k = 0
        while thread.is_alive() and k < 5000:  # beyond which float32 cannot count
            k += 1
            worker.observe({"w": np.full(2_000_000, k, np.float32)})
            worker.exchange()
            begun.set()
        thread.join()
    assert len(set(saved)) > 1
    assert wrong == [0] * 8
