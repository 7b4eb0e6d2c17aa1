"""The words and numbers that the screen and the plot share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from springline.monitor.metrics import Evaluation

RULES = {"elastic": "elastic averaging", "average": "model averaging", "agn": "AGN"}


def rule_in_words(settings: Mapping[str, Any]) -> str:
    """Say what a center's workers agree on.

    >>> rule_in_words({"rule": "elastic", "period": 10, "moving_rate": 0.225, "workers": 4})
    'elastic averaging, τ = 10, α = 0.225'
    """
    if not settings:
        return ""
    words = [RULES.get(settings["rule"], settings["rule"]), f"τ = {settings['period']}"]
    if "moving_rate" in settings:
        words.append(f"α = {settings['moving_rate']:.3g}")
    if "outer" in settings:
        words.append(f"outer {settings['outer'].get('kind', '')}".rstrip())
    return ", ".join(words)


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
