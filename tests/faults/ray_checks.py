"""What a center must be at the end of a run with a fault, and how that has gone."""

from dataclasses import dataclass

import numpy as np
from ray_worker import BASE

FOREIGN = -1e6  # what a worker that comes late brings with it: it must never be in the center


@dataclass
class Outcome:
    """How a run with a fault has gone.

    Args:
        fault: what happened.
        rule: of the run.
        usual: seconds between two exchanges of a worker before the fault.
        gap: the longest since, of the workers that lived.
        lost: what is not in the center.
    """

    fault: str
    rule: str
    usual: float
    gap: float
    lost: str

    @classmethod
    def of(cls, scene, fault, ranks, lost):
        gap, usual = scene.gap(*ranks)
        return cls(fault, scene.rule, usual, gap, lost)


def check(scene, steps, found, losses=None, interrupted=()):
    """Compare the center with what it must be; say what was lost.

    Args:
        scene: the run, at its end.
        steps: each rank's.
        found: what the watcher saw.
        losses: by shard, of each rank, how many exchanges it may have lost.
        interrupted: ranks that were killed, perhaps between two shards.
    """
    losses = losses or {}
    for low, high in found["shards"]:
        assert FOREIGN / 100 < low <= high, found
    if scene.rule == "average":
        means = {mean(ranks) for ranks in _sets(scene.workers)}
        assert all(set(log.values) <= means for log in scene.logs()), found
        return "nothing" if not losses else "nothing: the round is made again"
    if scene.rule == "elastic":
        return _check_conserved(scene, steps, found, losses, interrupted)
    counts = counts_of(scene, found["shards"])
    allowed = np.zeros_like(counts)
    for shard, at_most in losses.items():
        allowed[shard] = at_most + 1  # one may have ended before we looked at the log
    allowed[:, list(interrupted)] += 1
    lost = steps - counts
    assert ((lost >= 0) & (lost <= allowed)).all(), (steps, counts, allowed)
    return said(lost)


def _check_conserved(scene, steps, found, losses, interrupted):
    """Under elastic averaging workers and center have together what the steps have added."""
    logs = [scene.log(rank) for rank in range(scene.workers)]
    for k, (c, _) in enumerate(found["shards"]):
        brought, added = sum(log.born[0].values[k] for log in logs), float(steps.sum())
        gone = brought + added - c - sum(log.done[k] for log in logs)
        assert 0 < c <= steps.max(), found
        if k not in losses and not interrupted:
            assert abs(gone) < 1e-9 * added, (k, gone, added)
    if losses:
        at_most = sum(int(sum(of_ranks)) for of_ranks in losses.values())
        return f"at most {at_most} exchanges, in {len(losses)} of {scene.shards} shards"
    return "what it had learned since its last exchange" if interrupted else "nothing"


def counts_of(scene, shards):
    """Each shard's count of each rank's exchanges, under AGN: all its elements agree on it."""
    for low, high in shards:
        assert low == high, f"a part of the center has {low} and {high}"
    counted = [int(low) for low, _ in shards]
    return np.array([[c // BASE**rank % BASE for rank in range(scene.workers)] for c in counted])


def said(lost):
    """Say how many exchanges were lost, by shard and rank."""
    total = int(lost.sum())
    shards = int((lost.sum(axis=1) > 0).sum())
    exchanges = "1 exchange" if total == 1 else f"{total} exchanges"
    return f"{exchanges}, in {shards} of {len(lost)} shards" if total else "nothing"


def mean(ranks):
    """What a round of these workers gives."""
    return sum(4.0**rank for rank in ranks) / len(ranks)


def _sets(workers):
    bits = range(1, 2**workers)
    return [[rank for rank in range(workers) if chosen >> rank & 1] for chosen in bits]
