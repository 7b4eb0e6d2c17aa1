"""Schedules of the period, for `period=`."""

from springline.rules.period import QSR, Schedule, Warmup

__all__ = ["QSR", "Schedule", "Warmup"]
