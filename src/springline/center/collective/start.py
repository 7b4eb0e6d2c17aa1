"""What the ranks of a process group must agree on before they start."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from springline.center.center import check_settings
from springline.center.collective.group import Group
from springline.center.layout import Layout
from springline.center.plan import differences
from springline.errors import CenterError, LayoutError, SettingsError
from springline.rules.rule import Rule


def agree(
    group: Group, layout: Layout, rule: Rule, prepare: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Compare this rank with all others.

    Args:
        group: its ranks; all of them must.
        layout: this rank's, the same on all of them.
        rule: this rank's, the same on all of them.
        prepare: what is to be done before; if it raises on one rank, all of them refuse.

    Returns:
        What `prepare` has returned on rank 0.
    """
    mine: dict[str, Any] = {"layout": layout.to_json(), "settings": rule.settings()}
    found: Exception | None = None
    try:
        mine |= prepare()
    except Exception as error:  # reported to the others, whatever it is
        found = error
        mine["error"] = str(error)
    all_ranks = [json.loads(text) for text in group.gather(json.dumps(mine))]
    try:
        for rank, other in enumerate(all_ranks):
            _compare(rank, other, all_ranks[0])
    except CenterError as error:
        group.part()  # all ranks do
        raise (found or error) from None
    first: dict[str, Any] = all_ranks[0]
    return first


def check_workers(rule: Rule, ranks: int) -> None:
    """Refuse a rule that is for another number of workers."""
    if rule.workers != ranks:
        raise SettingsError(
            f"The rule has workers={rule.workers}, but the process group has {ranks} ranks."
        )


def check_goes_on(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint with other settings.

    A group may have become larger or smaller, though, and what depends on its size with it.
    """
    size = () if before.get("workers") == now["workers"] else ("workers", "moving_rate")
    ours, its = ({k: v for k, v in each.items() if k not in size} for each in (before, now))
    check_settings(ours, its)


def _compare(rank: int, other: dict[str, Any], first: dict[str, Any]) -> None:
    """Refuse a rank that differs from rank 0; all ranks find the same one."""
    if "error" in other:
        raise CenterError(f"Rank {rank} could not start: {other['error']}")
    difference = Layout.from_json(first["layout"]).difference(Layout.from_json(other["layout"]))
    if difference:
        raise LayoutError(
            f"The model of rank {rank} differs from rank 0's, which is the center's: {difference}. "
            "Start all ranks with the same model."
        )
    for key, ours, its in differences(first["settings"], other["settings"]):
        raise SettingsError(
            f"Rank {rank} comes with {key}={its!r}, rank 0 with {key}={ours!r}. Start all ranks "
            "with the same settings."
        )
