"""A run in words: what the screen, the plot and plain lines share."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from springline.monitor.metrics import Evaluation
from springline.monitor.status import Status

RULES = {
    "elastic": "elastic averaging",
    "average": "model averaging",
    "agn": "AGN",
    "diloco": "DiLoCo",
    "async_diloco": "asynchronous DiLoCo",
    "slowmo": "SlowMo",
}


def rule_in_words(settings: Mapping[str, Any]) -> str:
    """Describe what a center's workers agree on.

    >>> rule_in_words({"rule": "elastic", "period": 10, "moving_rate": 0.225, "workers": 4})
    'elastic averaging, τ = 10, α = 0.225'
    """
    if not settings:
        return ""
    fragments = settings.get("fragments", 1)
    count = len(fragments) if isinstance(fragments, list) else fragments
    words = [RULES.get(settings["rule"], settings["rule"]), _period(settings["period"], count)]
    if count > 1:
        words.append(f"{count} fragments")
    if settings.get("delay"):
        words.append(f"delay {settings['delay']}")
    if "moving_rate" in settings:
        words.append(f"α = {settings['moving_rate']:.3g}")
    if "outer" in settings:
        words.append(f"outer {settings['outer'].get('kind', '')}".rstrip())
    return ", ".join(words)


def _period(period: int | str, fragments: int) -> str:
    """Show τ; of a schedule the first and the last of the exchanges that its settings hold.

    >>> _period(10, 1), _period("Warmup: 1×3 10×997", 1), _period("schedule: 2×1 5×3 ...", 4)
    ('τ = 10', 'τ = 1 to 10 (Warmup)', 'τ = 8 to 20 (schedule)')
    """
    if not isinstance(period, str):
        return f"τ = {period}"
    name, _, gaps = period.partition(":")
    steps = [fragments * int(gap) for gap in re.findall(r"(\d+)×", gaps)]
    return f"τ = {steps[0]} to {steps[-1]} ({name})" if steps else f"τ by {name}"


def many(count: int, noun: str) -> str:
    """Count things.

    >>> many(1, "worker"), many(1200, "step")
    ('1 worker', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def clock(seconds: float) -> str:
    """Show a duration as a clock does.

    >>> clock(83.9), clock(100_000)
    ('0:01:23', '27:46:40')
    """
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def ago(seconds: float) -> str:
    """Show how long ago something was.

    >>> ago(12.3), ago(200), ago(8000), ago(200_000)
    ('12 s ago', '3 min ago', '2 h ago', '2 days ago')
    """
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {word} ago"
    return f"{seconds / 86_400:.0f} days ago"


def loss_in_words(loss: float | None) -> str:
    """Show a loss in four or five digits.

    >>> [loss_in_words(x) for x in (None, 2.07123, 1234.56, 1.5e-7, float("nan"))]
    ['-', '2.0712', '1234.6', '1.5e-07', 'NaN/Inf']
    """
    if loss is None:
        return "-"
    if math.isnan(loss):
        return "NaN/Inf"
    if loss == 0 or 1e-3 <= abs(loss) < 10:
        return f"{loss:.4f}"
    return f"{loss:.5g}"


def evaluations_in_words(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """Show what was evaluated last, all values of one step together.

    >>> last = {"val_loss": Evaluation(0.0, 1200, 2.07123), "val_acc": Evaluation(0.0, 1200, 0.5)}
    >>> evaluations_in_words(last)
    ['val_loss 2.0712, val_acc 0.5000 at step 1,200']
    """
    steps: dict[int, list[str]] = {}
    for name, last in evaluations.items():
        steps.setdefault(last.step, []).append(f"{name} {loss_in_words(last.value)}")
    return [f"{', '.join(words)} at step {step:,}" for step, words in sorted(steps.items())]


def whole_steps(status: Status, total: int) -> int:
    """Count the steps of the whole run; a rank that is further than asked for stays there."""
    return sum(max(total, worker.step) for worker in status.workers)


def footer(status: Status) -> str:
    """Describe a run's center, for the live screen."""
    return "  ·  ".join([_center_in_words(status), *_outer_rate(status), *_left_out(status)])


def _left_out(status: Status) -> list[str]:
    parts = [f"{many(status.left_out, 'part')} left out"] if status.left_out else []
    lines = f"{many(status.bad_lines, 'bad line')} of metrics skipped"
    return [*parts, lines] if status.bad_lines else parts


def _center_in_words(status: Status) -> str:
    if status.version is None and status.ps:
        return f"the center is on {many(status.ps, 'parameter server')}"
    age = status.checkpoint_age
    if status.version is None and age is not None and not status.settings:
        return f"the center is on every rank  ·  checkpoint {ago(age)}"
    if status.version is None:
        return "no center yet" if not status.settings else "the center is gone; no checkpoint"
    words = [f"center version {status.version:,}"]
    if age is not None or not status.on_cluster:
        words.append("no checkpoint yet" if age is None else f"checkpoint {ago(age)}")
    words.append(f"{decimal(status.bytes_exchanged)} exchanged")
    return "  ·  ".join(words)


def _outer_rate(status: Status) -> list[str]:
    rate = status.outer_rate
    return [] if rate is None else [f"outer learning rate {rate:.3g}"]


def introduction(status: Status) -> str:
    """Describe a run in one line: where it is, its rule and its workers."""
    rule, workers = rule_in_words(status.settings), many(len(status.workers), "worker")
    return f"{status.directory}: {rule}, {workers}"


def line(status: Status) -> str:
    """Describe in one line how far a run has come."""
    workers, total = status.workers, status.total
    done = sum(worker.step for worker in workers)
    words = [clock(status.elapsed)]
    if total and workers:
        whole = whole_steps(status, total)
        words.append(f"{done:,} of {whole:,} steps ({math.floor(100 * done / whole)}%)")
    else:
        words.append(many(done, "step"))
    rates = [worker.rate for worker in workers if worker.rate is not None]
    if rates:
        words.append(f"{sum(rates):,.1f} steps/s")
    losses = [worker.loss for worker in workers if worker.loss is not None]
    finite = [loss for loss in losses if not math.isnan(loss)]
    if finite:
        words.append(f"loss {loss_in_words(sum(finite) / len(finite))}")
    if len(losses) > len(finite):
        words.append(f"loss NaN/Inf in {many(len(losses) - len(finite), 'worker')}")
    distances = [w.distance for w in workers if w.distance is not None]
    if distances:
        words.append(f"distance {max(distances):.2g}")
    words += _outer_rate(status)
    words += evaluations_in_words(status.evaluations)
    if status.version is not None:
        words.append(f"version {status.version:,}")
        words.append(f"{decimal(status.bytes_exchanged)} exchanged")
    words += _left_out(status)
    restarts = sum(worker.restarts for worker in workers)
    if restarts:
        words.append(many(restarts, "restart"))
    states = Counter(worker.state for worker in workers)
    words.append(", ".join(f"{count} {state}" for state, count in states.items()))
    return "  ".join(word for word in words if word)
