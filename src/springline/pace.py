"""When a worker exchanges next."""

from __future__ import annotations

import time

from springline.center.center import Member
from springline.rules.rule import Rule


class Pace:
    """The local step at which the next exchange begins.

    Args:
        rule: its period is how many steps lie between two exchanges.

    Attributes:
        number: of the next exchange: in rounds the center's, which decides.
        due: the local step at which it begins; None until the first step towards it.
        speed: local steps per second, up to the last exchange.
    """

    def __init__(self, rule: Rule) -> None:
        self._gaps = rule.gaps()
        self._delay = rule.delay
        self._paced = rule.paced
        self._since = 0, time.perf_counter()  # local step and time of the last exchange
        self.number = 0
        self.due: int | None = None
        self.speed = 0.0

    def plan(self, done: int, before: int, rounds: bool, member: Member) -> int:
        """Return when the next exchange begins.

        With a constant gap exchanges end at its multiples. A delay lets each begin so much earlier.
        To be asked when a step towards it is made: a schedule need not know of others.

        Args:
            done: local steps.
            before: those of the rank before it was restarted.
            rounds: whether exchanges are rounds.
            member: knows how fast others are.
        """
        gap, delay = self._gaps.constant, self._delay
        if gap is None and rounds:
            return done + self._gaps.before_round(self.number)
        if gap is None:
            return done + self._gaps.at(before + done)
        if self._paced:
            fastest = member.fastest()
            share = min(1.0, self.speed / fastest) if fastest and self.speed else 1.0
            return done + max(1, int(gap * share))
        return (done + delay) // gap * gap + gap - delay

    def pause(self, done: int) -> float:
        """Return the steps per second since the last exchange, as one begins."""
        step, since = self._since
        seconds = time.perf_counter() - since
        self.speed = max(0, done - step) / seconds if seconds else 0.0
        self.number += 1
        return self.speed

    def resume(self, done: int) -> None:
        """Measure the speed from here on."""
        self._since = done, time.perf_counter()
