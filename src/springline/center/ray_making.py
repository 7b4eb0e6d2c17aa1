"""How a center on a Ray cluster is made: its actors, where they are, and how many."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from springline.center.errors import CenterError, forgotten
from springline.center.layout import Layout
from springline.center.plan import Plan
from springline.center.ray_peer import (
    RayPeer,
    find,
    homes,
    ray,
    shard_name,
    shard_peers,
    shards_named,
)
from springline.center.served.book import KEPT
from springline.center.served.center import first_parts
from springline.center.served.messages import Row, cut
from springline.center.served.peer import Call
from springline.center.served.storage import Storage
from springline.rules.rule import Rule

_log = logging.getLogger("springline")
_PROCESS = 150e6  # bytes of memory that an actor's process takes, beside what it holds
_SHARD = 256e6  # bytes of the center that a shard holds at most, by default
_SEEN = 10.0  # seconds until what was written on one machine is seen on another


class OutrunError(Exception):
    """Another makes the center by now."""


class Maker:
    """Makes the shards of a new center.

    Args:
        name: the center's.
        plan: what is made.
        rule: the workers'.
        head: which has chosen us to make it.
        who: we are, to the head.
    """

    def __init__(self, name: str, plan: Plan, rule: Rule, head: RayPeer, who: str) -> None:
        self._name, self._plan, self._rule = name, plan, rule
        self._head, self._who = head, who

    def make(
        self,
        values: Mapping[str, Any],
        restore: str | Path | None,
        shards: int | None,
        storage: str | None,
        every: tuple[int, float],
    ) -> dict[str, Any]:
        """Make the shards; return what the head is to tell about the center.

        Raises:
            OutrunError: we took so long that it is for another to make now.
        """
        plan = self._plan
        asked = _how_many(plan, self._rule, shards, saved=storage is not None)
        parts, version, steps = first_parts(plan, values, asked, restore)
        if len(parts) < (shards or 0):
            has = f"{len(parts)} shard{'s' * (len(parts) > 1)}"
            _log.warning("The center has %s: this model cannot be cut into %d.", has, shards)
        description = {
            "name": self._name,
            "plan": plan.to_json(),
            "asked": asked,
            "shards": len(parts),
            "base": version,
            "digest": digest(plan.layout, values),
            "storage": storage,
            "every": list(every),
        }
        self._check_ours()
        _end_what_is_left(self._name)
        self._check_ours()
        handles = find_shards(self._name, self._rule, self._head, description)
        try:
            peers = zip(shard_peers(self._name, handles), parts, strict=True)
            calls = [Call(peer, "initialise", *part, steps) for peer, part in peers]
            for call in calls:
                call.result()
            if storage:
                self._check_kept(storage, len(parts))
        except Exception:
            self._check_ours()  # else these are another's
            _end(handles)
            raise
        except BaseException:  # Ctrl-C
            if self._is_ours():
                _end(handles)
            raise
        return description

    def _check_ours(self) -> None:
        if not self._is_ours():
            raise OutrunError

    def _is_ours(self) -> bool:
        return bool(Call(self._head, "makes", self._who).result())

    def _check_kept(self, storage: str, shards: int) -> None:
        """Refuse a storage that is another one on the machine of a shard or of the head."""
        place, names = Storage(storage), [f"shard-{k}" for k in range(shards)]
        deadline = time.monotonic() + _SEEN
        while True:
            unseen = [name for name in names if not place.holds(name)]
            blind = Call(self._head, "misses", names).result()
            if not unseen and not blind:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        who = unseen[0] if unseen else "the head"
        raise CenterError(
            f"The storage {storage} is not the same on all machines: {who} of the center has "
            "another one. Give a directory that every machine of the cluster sees, also those "
            "without workers, or an fsspec URL."
        )


def _end(handles: Sequence[Any]) -> None:
    for handle in handles:
        ray.kill(handle)


def find_shards(name: str, rule: Rule, head: RayPeer, description: Mapping[str, Any]) -> list[Any]:
    """Return a center's shards, which its head makes if they are not there."""
    Call(head, "make_shards", rule, description).result()
    return [find(shard_name(name, k)) for k in range(description["shards"])]


def _end_what_is_left(name: str) -> None:
    """End the shards of somebody who was killed while making the center."""
    for actor, handle in shards_named(name).items():
        rows: dict[int, Row] = {}
        with contextlib.suppress(CenterError):  # one that could not start has none
            rows, _ = Call(RayPeer(actor, actor, handle), "rows").result()
        if any(row.incarnation for row in rows.values()):
            raise forgotten(f"The center {name!r}")
        ray.kill(handle)


def digest(layout: Layout, values: Mapping[str, Any]) -> int:
    """Return a checksum of a worker's own values."""
    digest = 0
    for entry in layout.entries:
        value: Any = np.ascontiguousarray(values[entry.name], entry.center_dtype)
        digest = zlib.crc32(value.reshape(-1).view(np.uint8), digest)
    return digest


def _how_many(plan: Plan, rule: Rule, shards: int | None, saved: bool) -> int:
    """Return into how many shards to cut a center; refuse more than there is memory for."""
    nodes = homes()
    held = plan.layout.nbytes + plan.state_nbytes
    if shards is None:
        shards = max(2, len(nodes), int(-(-held // _SHARD)))
    if shards < 1:
        raise CenterError(f"`shards` must be an integer >= 1. Received: {shards}.")
    memory = sum(node["Resources"].get("memory", 0.0) for node in nodes)
    replies = min(plan.workers, KEPT) if rule.adopts_message else 1
    slots = plan.workers if plan.synchronous else 1 + replies  # and a message on its way
    copies = 2 if saved else 0  # while checkpoints are written, perhaps all at once
    needed = len(cut(plan, shards)) * _PROCESS + (1 + copies) * held + slots * plan.layout.nbytes
    if needed > memory:
        raise CenterError(
            f"A center of {held / 1e9:.3g} GB in {shards} shards needs about {needed / 1e9:.3g} GB "
            f"of memory; the machines for it have {memory / 1e9:.3g} GB. Use fewer shards, or add "
            "machines."
        )
    return shards
