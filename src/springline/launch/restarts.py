"""How often a worker that dies is restarted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from springline.launch.directory import LaunchError


@dataclass
class RestartPolicy:
    """So many restarts of each worker within a window: older ones do not count.

    Args:
        most: how many; −1 for no limit.
        window: in seconds.

    >>> policy = RestartPolicy(1)
    >>> policy.next("worker 0"), policy.next("worker 1"), policy.next("worker 0")
    ('1 of 1', '1 of 1', None)
    >>> [policy.recurs("worker 0", "KeyError: 'x'", steps) for steps in (0, 0, 7)]
    [False, True, False]
    """

    most: int = 3
    window: float = 600.0
    _times: dict[str, list[float]] = field(default_factory=dict)  # by worker
    _ends: dict[str, tuple[str | None, int]] = field(default_factory=dict)  # the last, by worker

    def check(self) -> None:
        """Refuse numbers that are out of range."""
        if self.most < -1:
            raise LaunchError(
                "`--max-restarts` must be an integer >= 0, or -1 for no limit. Received: "
                f"{self.most}."
            )
        if not self.window > 0:
            raise LaunchError(f"`--restart-window` must be seconds > 0. Received: {self.window:g}.")

    def next(self, name: str) -> str | None:
        """Count a restart of a worker; return which one it is, or None if there is none left."""
        now = time.monotonic()
        recent = [at for at in self._times.get(name, []) if now - at < self.window]
        if -1 < self.most <= len(recent):
            return None
        self._times[name] = [*recent, now]
        return f"{len(recent) + 1} of {self.most}" if self.most > -1 else f"{len(recent) + 1}"

    def recurs(self, name: str, error: str | None, steps: int) -> bool:
        """Note how a worker has ended; return whether a restart would end like the last one.

        Args:
            name: the worker's.
            error: which its script has ended with; None if that is not known.
            steps: how far its rank has come.
        """
        before, self._ends[name] = self._ends.get(name), (error, steps)
        return self.most > -1 and error is not None and before == (error, steps)
