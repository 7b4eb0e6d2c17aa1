"""Workers that are copies of each other: they cost as much as many, and learn as one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.center import Center
from springline.center.layout import Bytes
from springline.rules.rule import Rule

_ROUNDS = 3  # in which workers are the same before it is reported
_ENTRIES, _VALUES = 64, 16  # parameters that are looked at, and values of each
_log = logging.getLogger("springline")


class Replicas:
    """Notices that all workers hold the same parameters in every round.

    The mean of different workers is none of them; that of copies is each of them. A few values of
    many parameters show it: of those that have moved since the last round.

    Attributes:
        done: whether there is nothing to notice any more.
    """

    def __init__(self, center: Center, rule: Rule, rank: int) -> None:
        self._center = center
        self._rank = rank
        entries = [e for e in center.layout.entries if e.kind == "parameter"]
        self._entries = [
            [e for e in entries if e.fragment == fragment][:_ENTRIES]
            for fragment in range(center.layout.fragments)
        ]
        self._last: dict[int, NDArray[Any]] = {}  # what it had after a fragment's last round
        self._same = 0
        self.done = not rule.rounds or rule.workers < 2

    def look(self, x: Bytes, fragment: int) -> NDArray[Any]:
        """Return a few values of many parameters of a fragment."""
        flat = [entry.view(x).reshape(-1) for entry in self._entries[fragment]]
        few = [values[:: max(1, len(values) // _VALUES)].astype(float) for values in flat]
        return np.concatenate([np.zeros(0), *few])

    def compare(self, before: NDArray[Any], after: NDArray[Any], fragment: int) -> None:
        """Compare what the worker had before a fragment's round with what it has now."""
        moved = before != self._last.get(fragment, before)
        self._last[fragment] = after
        if not moved.any():
            return  # it has trained nothing
        self.done = not np.allclose(before[moved], after[moved], rtol=1e-6, atol=0.0)
        self._same += 1
        if self.done or self._same < _ROUNDS:
            return
        self._same = 0
        if len(self._center.members()) > 1:  # else it is the only one
            self.done = True
            _log.warning(
                "Rank %d: all workers hold the same parameters in every round, so that they learn "
                "no more than one. Does each see data of its own (`springline.rank()`), and has "
                "nothing else wrapped the model, as DistributedDataParallel does?",
                self._rank,
            )
