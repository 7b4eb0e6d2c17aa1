"""A center inside one process: for a script that runs alone, and for workers that are threads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from springline.center.layout import Layout, aligned_zeros
from springline.center.locks import ThreadLocks
from springline.center.memory import MemoryCenter
from springline.center.plan import Plan
from springline.rules.rule import Rule


class LocalCenter(MemoryCenter):
    """A center in this process's own memory.

    Args:
        layout: the model's.
        rule: what its workers will do.
        values: the center's first values, by name.
        use_locking: whether an exchange is atomic, per part of the center.
        restore: a checkpoint to take the first values from, instead of `values`.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        *,
        use_locking: bool = True,
        restore: Path | None = None,
    ) -> None:
        plan = Plan.of(layout, rule, use_locking)
        super().__init__(plan, aligned_zeros(plan.nbytes), ThreadLocks())
        self.initialise(values)
        if restore:
            self.restore(restore)
