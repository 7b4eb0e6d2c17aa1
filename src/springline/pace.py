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
        due: the local step at which it begins.
        speed: local steps per second, up to the last exchange.
    """

    def __init__(self, rule: Rule) -> None:
        self._gaps = rule.gaps()
        self._delay = rule.delay
        self._paced = rule.paced
        self._since = 0, time.perf_counter()  # local step and time of the last exchange
        self.number = 0
        self.due = 0
        self.speed = 0.0

    def plan(self, number: int, done: int, before: int, rounds: bool, member: Member) -> None:
        """Set when an exchange begins.

        With a constant gap exchanges end at its multiples. A delay lets each begin so much earlier.

        Args:
            number: of the exchange.
            done: local steps.
            before: those of the rank before it was restarted.
            rounds: whether exchanges are rounds.
            member: knows how fast others are.
        """
        gap, delay = self._gaps.constant, self._delay
        if gap is not None and not self._paced:
            self.due = (done + delay) // gap * gap + gap - delay
        elif gap is not None:
            fastest = member.fastest()
            share = min(1.0, self.speed / fastest) if fastest and self.speed else 1.0
            self.due = done + max(1, int(gap * share))
        elif rounds:
            self.due = done + self._gaps.before_round(number)
        else:
            self.due = done + self._gaps.at(before + done)

    def pause(self, done: int) -> float:
        """Return the steps per second since the last exchange, as one begins."""
        step, since = self._since
        seconds = time.perf_counter() - since
        self.speed = (done - step) / seconds if seconds else 0.0
        self.number += 1
        return self.speed

    def resume(self, done: int) -> None:
        """Measure the speed from here on."""
        self._since = done, time.perf_counter()
