"""Which runs the time-to-loss benchmark makes, the most important first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from time_to_loss_runs import FRACTIONS, RULES, Job, Results, Setting

FIRST_FRACTION = 0.7
RESERVE = 28  # runs that are left, at least, when other settings are no longer tried


def wanted(results: Results, minutes: float) -> Iterator[Job]:
    """Yield the runs that are still to be made; ask again after each, it changes the answer.

    Those that are timed come last, close together: they are compared with each other.
    """
    scale, alone = results.scale, Setting()
    first_of = {setting.rule: setting for setting in reversed(scale.settings)}
    yield from tune(results, alone, scale.first_rate)
    for rule in RULES:
        yield from tune(results, first_of[rule], results.rate(alone))
    for setting in scale.settings:
        reserve = RESERVE * results.cost(Job(alone, scale.first_rate))
        if setting not in first_of.values() and results.spent + reserve < 60 * minutes:
            yield from tune(results, setting, results.rate(first_of[setting.rule]))
    timed = [alone, *(best for rule in RULES if (best := results.best(rule)))]
    for setting in timed:
        yield from _missing(results, Job(setting, results.rate(setting), 1.0, scale.seeds[0]))
    for setting in timed[1:]:
        yield from _shorten(results, setting, scale.seeds[0], FIRST_FRACTION)
    if recommended := results.recommended():
        start = results.fastest(recommended, scale.seeds[0]).fraction
        for seed in scale.seeds[1:]:
            yield from _missing(results, Job(alone, results.rate(alone), 1.0, seed))
            yield from _shorten(results, recommended, seed, start)


def _missing(results: Results, job: Job) -> Iterator[Job]:
    if job not in results.runs:
        yield job


def tune(results: Results, setting: Setting, start: float) -> Iterator[Job]:
    """Climb: until the best rate is better than both its neighbours."""
    rates, seed = results.scale.rates, results.scale.seeds[0]
    yield from _missing(results, Job(setting, start, 1.0, seed, tuning=True))
    best = rates.index(results.rate(setting) if results.tried(setting) else start)
    for neighbour in (best + 1, best - 1):
        if 0 <= neighbour < len(rates):
            job = Job(setting, rates[neighbour], 1.0, seed, tuning=True)
            if job not in results.runs:
                yield job
                return  # it decides whether the other one is needed


def _shorten(results: Results, setting: Setting, seed: int, start: float) -> Iterator[Job]:
    """Look for the shortest schedule that still reaches one worker's final loss."""
    rate, at = results.rate(setting), FRACTIONS.index(start)

    def reaches(fraction: float) -> bool:
        return math.isfinite(results.ratio(Job(setting, rate, fraction, seed)))

    # With all steps or never, on the first seed; other seeds walk up to them only if they must.
    if seed == results.scale.seeds[0] and not reaches(1.0):
        return
    yield from _missing(results, Job(setting, rate, start, seed))
    step = 1 if reaches(start) else -1
    while 0 <= at + step < len(FRACTIONS) and reaches(FRACTIONS[at]) == (step == 1):
        at += step
        yield from _missing(results, Job(setting, rate, FRACTIONS[at], seed))
