"""Workers that are copies of each other: they cost as much as many, and learn as one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.center import Center, Member
from springline.center.layout import Bytes, Entry, Layout
from springline.center.local import Local
from springline.center.memory import LocalCenter
from springline.center.plan import BASE
from springline.errors import NonFiniteError
from springline.rules.rule import Rule

_ROUNDS = 3  # in which workers are the same before it is reported
_ENTRIES, _VALUES = 64, 16  # parameters that are looked at, and values of each
_MOVED = 1e-4  # the share of itself that a value must have moved to show anything
_log = logging.getLogger("springline")


class Replicas:
    """Notices that every round of a worker goes as if it were alone.

    The mean of different messages is none of them; that of copies is each of them. A few values of
    many parameters show it: they are exchanged with a center of this worker's own, too, and come
    out the same. Without rounds this shows nothing, and with overlap it may not: copies adopt the
    center at different steps. Rules that only a process group takes have no such center.

    Attributes:
        done: whether there is nothing to notice any more.
    """

    def __init__(self, center: Center, rule: Rule, member: Member, own: Local) -> None:
        self._center = center
        self._rule = rule
        self._member = member
        self._own = own  # where every fragment is; a snapshot has one
        self._alone: _Alone | None = None
        self._with_others = False
        self._same = 0
        self.done = not rule.rounds or rule.adopts_seen or rule.workers < 2

    def before(self, local: Local) -> None:
        """Look at what the worker brings to a round."""
        number = self._member.number
        if self._alone is None or self._alone.number != number:  # the first, or some were missed
            self._alone = _Alone(self._center.layout, self._rule, self._own, number)
        self._alone.look(local)
        if self._same == _ROUNDS - 1:  # ask only before a round that may decide
            self._with_others = len(self._center.members()) > 1

    def after(self, local: Local) -> None:
        """Compare what it has after the round with what it would have alone."""
        same = self._alone and self._alone.ends_like(local)
        if same is None:
            return  # it has trained nothing
        if same and self._same < _ROUNDS - 1:
            self._same += 1
            return
        if same and not self._with_others:
            return  # it was the only one when the round began
        self.done, self._alone = True, None
        if same:
            _log.warning(
                "Rank %d: all workers hold the same parameters in every round, so that they learn "
                "no more than one. Does each see data of its own (`springline.rank()`), and has "
                "nothing else wrapped the model, as DistributedDataParallel does?",
                self._member.rank,
            )


class _Alone:
    """The same worker alone with its center, reduced to a few values of its parameters."""

    def __init__(self, layout: Layout, rule: Rule, local: Local, number: int) -> None:
        self._whole = rule.outer.whole
        chosen = [self._choose(layout, fragment) for fragment in range(layout.fragments)]
        self._entries = [layout.entries[k] for k in sorted(k for some in chosen for k in some)]
        self._places = [layout.index[e.name] for e in self._entries]
        rows = [
            (e.name, self._few(e, local.x).shape, e.center_dtype, e.kind, e.fragment)
            for e in self._entries
        ]
        self._layout = Layout.from_json(rows)
        self._local = Local(self._layout, rule)
        self._last = self._layout.allocate()  # what the worker had after the last round
        if local.base is not None:
            self._copy(local.base, self._last)
        center = LocalCenter(self._layout, rule, self._layout.views(self._last))
        center.memory.head[BASE] = number
        self._member = center.join(0, rule)
        self._member.take(self._local.x)

    @property
    def number(self) -> int:
        """The number of the next round."""
        return self._member.number

    def _choose(self, layout: Layout, fragment: int) -> list[int]:
        """Return which of a fragment's parameters to look at."""
        sizes = {
            k: e.nbytes
            for k, e in enumerate(layout.entries)
            if e.kind == "parameter" and e.fragment == fragment
        }
        if self._whole:  # which may take a while: the smallest
            return [min(sizes, key=lambda k: sizes[k] or layout.nbytes)]
        return list(sizes)[:_ENTRIES]

    def _few(self, entry: Entry, buffer: Bytes) -> NDArray[Any]:
        values = entry.view(buffer)
        return values if self._whole else values.reshape(-1)[:: max(1, values.size // _VALUES)]

    def _copy(self, buffer: Bytes, into: Bytes) -> None:
        for entry, mine in zip(self._entries, self._layout.entries, strict=True):
            np.copyto(mine.view(into), self._few(entry, buffer))

    def look(self, local: Local) -> None:
        """Take over what the worker brings."""
        self._copy(local.x, self._local.x)
        if local.base is not None and self._local.base is not None:
            self._copy(local.base, self._local.base)
        self._local.rates[:] = local.rates[self._places]

    def ends_like(self, local: Local) -> bool | None:
        """Make the round; whether the worker's ended the same, or None if it brought nothing."""
        fragment = self.number % self._layout.fragments
        entries = [e for e in self._layout.entries if e.fragment == fragment]

        def values(buffer: Bytes) -> NDArray[Any]:
            return np.concatenate([e.view(buffer).ravel().astype(float) for e in entries])

        gone = np.abs(values(self._local.x) - values(self._last))
        moved = gone > _MOVED * np.abs(values(self._last))
        try:
            self._member.exchange(self._local)
        except NonFiniteError:  # the mean was finite
            return False
        here = self._layout.allocate()
        self._copy(local.x, here)
        self._last = here
        near = np.isclose(values(self._local.x), values(here), rtol=1e-6, atol=1e-5 * gone)
        return bool(near[moved].all()) if moved.any() else None
