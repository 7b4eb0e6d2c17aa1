"""How fast a counter has been growing over the last few seconds."""

from __future__ import annotations

from collections import deque

_WINDOW = 5.0  # seconds
_STALLED = 2.0  # seconds without a change, where changes used to come faster


class Recent:
    """The last changes of a counter: those of the last seconds, and never fewer than two.

    >>> steps = Recent()
    >>> for second in range(20):
    ...     steps.add(second, 10 * second)
    >>> steps.rate(now=19.5), steps.rate(now=30)
    (10.0, 0.0)
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int, float]] = deque()

    def add(self, time: float, count: int, amount: float = 0.0) -> None:
        """Note a counter, and an amount that grows with it. One that goes back begins anew."""
        changes = self._changes
        if changes and count < changes[-1][1]:
            changes.clear()
        if not changes or count > changes[-1][1]:
            changes.append((time, count, amount))
        while len(changes) > 2 and changes[0][0] < changes[-1][0] - _WINDOW:
            changes.popleft()

    def clear(self) -> None:
        """Forget all."""
        self._changes.clear()

    def rate(self, now: float) -> float | None:
        """Return the growth per second: 0 if it has come to a halt by `now`, None if unknown."""
        if len(self._changes) < 2:
            return None
        (start, first, _), (end, last, _) = self._changes[0], self._changes[-1]
        interval = (end - start) / (len(self._changes) - 1)
        if now - end > max(_STALLED, 3 * interval):
            return 0.0
        return (last - first) / (end - start) if end > start else None

    def amount_per_count(self) -> float | None:
        """Return how much of the amount there was to each count; None if nothing was counted."""
        if not self._changes:
            return None
        _, last, total = self._changes[-1]
        _, first, before = self._changes[0] if len(self._changes) > 1 else (0.0, 0, 0.0)
        return (total - before) / (last - first) if last > first else None
