"""A process group as the place of a center."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from springline.center.collective.center import SAVE_EVERY, CollectiveCenter
from springline.center.collective.group import Group
from springline.center.layout import Layout
from springline.rules.rule import Rule


@dataclass(frozen=True)
class Collective:
    """A process group as the place of a center, for `center=` of an optimizer or a worker.

    Args:
        group: a `torch.distributed` process group, for instance `torch.distributed.group.WORLD`.
        directory: where rank 0 keeps checkpoints, from which a restarted group goes on; only rank 0
            needs to see it. None for no checkpoints.
        save_every: seconds between two of them, so that at most these are lost.
    """

    group: Any
    directory: str | Path | None = None
    save_every: float = SAVE_EVERY

    def __post_init__(self) -> None:
        if not hasattr(self.group, "allreduce"):
            raise TypeError(
                "`group` must be a process group that this process is in; call "
                "`torch.distributed.init_process_group()` first. "
                f"Received: {type(self.group).__name__} {self.group!r}."
            )
        if not self.save_every >= 0:
            raise ValueError(
                f"`save_every` must be seconds >= 0. Received: save_every={self.save_every!r}."
            )

    def __call__(
        self, layout: Layout, rule: Rule, values: Mapping[str, Any], timeout: float | None = None
    ) -> CollectiveCenter:
        """Make the center; all ranks of the group must."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"`timeout` must be seconds > 0, or None. Received: {timeout!r}.")
        directory = None if self.directory is None else Path(self.directory)
        group = Group(self.group, timeout)
        return CollectiveCenter(group, layout, rule, values, directory, self.save_every)
