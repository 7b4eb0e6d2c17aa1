"""What the ranks of a process group must agree on before they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from springline.center.center import check_settings
from springline.center.errors import CenterError, LayoutError, SettingsError
from springline.center.layout import Layout
from springline.rules.rule import Rule

if TYPE_CHECKING:
    from springline.center.collective import CollectiveCenter


def check_rule(center: CollectiveCenter, rule: Rule) -> None:
    """Refuse a rule that this kind of center does not take, or that is for other numbers."""
    if not center.takes(rule):
        raise SettingsError(
            f"The rule {rule.name!r} is asynchronous, but in a process group all ranks exchange at "
            "once, which only averaging and elastic averaging can. Start the script with "
            "`springline run`: its shared center takes every rule, and so does that on a Ray "
            "cluster (`--address`)."
        )
    if rule.workers != center.group.size:
        raise SettingsError(
            f"The rule has workers={rule.workers}, but the process group has {center.group.size} "
            "ranks."
        )


def check_goes_on(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint with other settings.

    A group may have become larger or smaller, though, and what depends on its size with it.
    """
    size = () if before.get("workers") == now["workers"] else ("workers", "moving_rate")
    ours, its = ({k: v for k, v in each.items() if k not in size} for each in (before, now))
    check_settings(ours, its)


def compare(rank: int, other: dict[str, Any], first: dict[str, Any]) -> None:
    """Refuse a rank that differs from rank 0; all ranks find the same one."""
    if "error" in other:
        raise CenterError(f"Rank {rank} could not start: {other['error']}")
    difference = Layout.from_json(first["layout"]).difference(Layout.from_json(other["layout"]))
    if difference:
        raise LayoutError(
            f"The model of rank {rank} differs from rank 0's, which is the center's: {difference}. "
            "Start all ranks with the same model."
        )
    ours, its = first["settings"], other["settings"]
    for key in [*ours, *(k for k in its if k not in ours)]:
        if ours.get(key) != its.get(key):
            raise SettingsError(
                f"Rank {rank} comes with {key}={its.get(key)!r}, rank 0 with {key}="
                f"{ours.get(key)!r}. Start all ranks with the same settings."
            )
