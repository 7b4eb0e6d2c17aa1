"""The address of a run's center on a Ray cluster, found in the environment.

    SPRINGLINE_ADDRESS    the cluster's, HOST:PORT
    SPRINGLINE_CENTER     the name of the run's center there
    SPRINGLINE_TOKEN      the center's token: a secret that all its workers share
    SPRINGLINE_SHARDS     how many shards the center has, if that was chosen
    SPRINGLINE_STORAGE    where its shards keep checkpoints, if anywhere
    SPRINGLINE_JOIN       1 if there is a center: if it is gone, no new one is made

`springline run --address` sets them. Without it, processes on any machine that reaches the cluster
meet with these, SPRINGLINE_RANK and SPRINGLINE_WORKERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from springline.center.center import Center
from springline.center.layout import Layout
from springline.errors import CenterError, TokenError
from springline.rules.rule import Rule


@dataclass(frozen=True)
class ClusterAddress:
    """Where a run's center is on a cluster."""

    address: str  # the cluster's
    center: str  # its name
    token: str = field(repr=False)  # the center's; it is in no log
    shards: int | None = None  # into how many it is cut; None to let the center choose
    storage: str | None = None  # where its shards keep checkpoints, if anywhere
    join: bool = False  # whether the center was made before, and must not be made again

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ClusterAddress | None:
        """Find the cluster; None for a run on one machine.

        >>> here = {"SPRINGLINE_ADDRESS": "10.0.0.1:6379", "SPRINGLINE_CENTER": "digits"}
        >>> here |= {"SPRINGLINE_SHARDS": "4", "SPRINGLINE_TOKEN": "0f"}
        >>> ClusterAddress.from_environment(here)
        ClusterAddress(address='10.0.0.1:6379', center='digits', shards=4, storage=None, join=False)
        """
        names = "ADDRESS", "CENTER", "TOKEN", "SHARDS", "STORAGE", "JOIN"
        given = [environment.get(f"SPRINGLINE_{name}", "").strip() for name in names]
        address, center, token, shards, storage, join = given
        if not address and not center:
            return None
        if not address or not center:
            raise ValueError(
                "SPRINGLINE_ADDRESS and SPRINGLINE_CENTER go together: the address of a Ray "
                "cluster and the name of the run's center there. Received: "
                f"SPRINGLINE_ADDRESS={address!r}, SPRINGLINE_CENTER={center!r}."
            )
        if not token:
            raise ValueError(
                f"SPRINGLINE_TOKEN is not set: the secret that all workers of {center!r} share, "
                "without which none can join. Make one with `openssl rand -hex 32`, and give "
                "each worker the same. That of a run is in RUN/token."
            )
        if shards and not (shards.isdigit() and int(shards)):
            raise ValueError(f"SPRINGLINE_SHARDS must be an integer >= 1. Received: {shards!r}.")
        return cls(address, center, token, int(shards or 0) or None, storage or None, join == "1")

    def environment(self) -> dict[str, str]:
        """Return the environment in which a worker finds this."""
        values = {**vars(self), "join": int(self.join)}
        return {f"SPRINGLINE_{k.upper()}": str(v) for k, v in values.items() if v}

    def create_or_join(
        self, layout: Layout, rule: Rule, values: Mapping[str, Any], use_locking: bool
    ) -> Center:
        """Open the run's center; the first worker makes it."""
        from springline.center.ray import RayCenter  # Ray may not be installed

        given = {name: value for name, value in vars(self).items() if name != "center"}
        about = self.center, layout, rule, values
        return RayCenter.create_or_join(*about, use_locking=use_locking, **given)

    def steps(self) -> list[int]:
        """Return how far each rank has come; nothing before there is a center."""
        from springline.center.ray import RayCenter
        from springline.center.remote.storage import Storage

        try:
            with RayCenter.open(self.center, self.address, token=self.token) as center:
                return [rank.steps for rank in center.progress()]
        except TokenError:
            raise
        except CenterError:  # all shards know all ranks, and have written that down
            saved = Storage(self.storage).read("shard-0") if self.storage else None
        rows = saved[0]["rows"] if saved else {}
        ranks = range(max(map(int, rows), default=-1) + 1)
        return [int(rows[str(rank)][2]) if str(rank) in rows else 0 for rank in ranks]
