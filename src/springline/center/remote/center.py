"""A center that is reached by calls to a head and shards, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center import checkpoint
from springline.center.center import Center, Progress, check_finite
from springline.center.layout import Bytes
from springline.center.plan import Plan
from springline.center.remote.ledger import Ledger
from springline.center.remote.member import RemoteMember
from springline.center.remote.messages import Look, RankProgress, cut, latest, span
from springline.center.remote.peer import Call, Peer
from springline.center.remote.registration import find_center
from springline.center.remote.storage import Storage
from springline.center.state import nbytes_of
from springline.errors import CenterError, CheckpointError
from springline.rules.rule import Rule
from springline.sealed import reading


class RemoteCenter(Center):
    """A center behind a head and shards."""

    def __init__(self, description: Mapping[str, Any], head: Peer, shards: Sequence[Peer]) -> None:
        self.plan = Plan.from_json(description["plan"])
        self.head = head
        self.shards = list(shards)
        self.parts = cut(self.plan, description["asked"])
        self.process = os.getpid()
        self._members: list[RemoteMember] = []
        self.base = int(description["base"])
        self._version = 0

    @property
    def version(self) -> int:
        """Exchanges so far, or rounds. It does not go back, also if a shard had to."""
        rows, closed = self._known()
        done = closed if self.plan.rounds else sum(row.exchanges for row in rows.values())
        self._version = max(self._version, self.base + done)
        return self._version

    def members(self) -> list[int]:
        """Return the ranks with a recent heartbeat."""
        return self._look().members

    def finished(self) -> list[int]:
        """Return the ranks that have made all their steps and left for good."""
        return self._look().finished

    def given_up(self) -> list[int] | None:
        """Return the ranks that a launcher does not restart; None if there is none."""
        return self._look().given_up

    def progress(self) -> list[Progress]:
        """Return how far each rank has come."""
        rows, _ = self._known()
        known = [rows.get(rank, RankProgress()) for rank in range(self.plan.workers)]
        return [Progress(row.steps, row.exchanges, row.seconds) for row in known]

    def read(self, out: Bytes | None = None) -> Bytes:
        """Copy the center into a flat buffer, consistent per shard."""
        out = self.layout.allocate() if out is None else out
        self.collect("read", out)
        return out

    def collect(self, method: str, out: Bytes) -> None:
        """Copy what all shards answer to a call into a flat buffer."""
        for place, reply in self._ask_shards(method):
            out[place] = reply.data

    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> RemoteMember:
        """Become the worker of that rank."""
        self.check_process()
        self.check_join(rank, rule, timeout)
        member = RemoteMember(self, int(rank), rule, timeout)
        self._members.append(member)
        return member

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, collected from all shards, to a file of this machine."""
        version, steps = self.version, [rank.steps for rank in self.progress()]
        center, state = self.layout.allocate(), np.zeros(self.plan.state_nbytes, np.uint8)
        for place, (part, its_state) in self._ask_shards("read_all"):
            center[place] = part
            _copy_state(self.plan, place.start, place.stop, its_state, state, into_whole=True)
        checkpoint.write(Path(path), self.plan, center, state, version, steps)

    def close(self) -> None:
        """Leave, with all members that joined through this object."""
        if not self.closed and os.getpid() == self.process:
            for member in list(self._members):
                member.leave()
            self.closed = True

    def forget(self, member: RemoteMember) -> None:
        """Let go of a member that has left."""
        if member in self._members:
            self._members.remove(member)

    def _known(self) -> tuple[dict[int, RankProgress], int]:
        """Return how far each rank has come, and the last round: the latest that is known."""
        self.check_process()
        asked = Call(self.shards[0], "rows")
        look = self._look()
        return latest([(look.rows, look.closed), asked.result()])

    def _look(self) -> Look:
        """Return what the head knows."""
        self.check_process()
        look: Look | None = Call(self.head, "look").result()
        if look is None:
            raise CenterError(
                "The center is gone. Start the run again; it goes on from its storage, if it has "
                "one."
            )
        return look

    def _ask_shards(self, method: str) -> Iterator[tuple[slice, Any]]:
        """Return which bytes each shard holds, and its answer."""
        self.check_process()
        calls = [Call(peer, method) for peer in self.shards]
        for ranges, call in zip(self.parts, calls, strict=True):
            yield slice(*span(ranges)), call.result()


def first_parts(
    plan: Plan, values: Mapping[str, Any], count: int, restore: str | Path | None
) -> tuple[list[tuple[Bytes, Bytes]], int, list[int]]:
    """Return what each shard of a new center begins with, the version, and each rank's steps."""
    check_finite(plan.layout, values)
    center, state = plan.layout.allocate(), np.zeros(plan.state_nbytes, np.uint8)
    plan.layout.write(center, values)
    for s in plan.state:
        s.view(state).fill(s.first)
    version, steps = 0, [0] * plan.workers
    if restore:
        saved = checkpoint.read(Path(restore), plan, center, state)
        version = saved.version
        steps = saved.steps if len(saved.steps) == plan.workers else steps
    parts = []
    for ranges in cut(plan, count):
        start, stop = span(ranges)
        own = np.zeros(nbytes_of(plan.state_within(start, stop)), np.uint8)
        _copy_state(plan, start, stop, own, state, into_whole=False)
        parts.append((center[start:stop], own))
    return parts, version, steps


@dataclass(frozen=True)
class StoredCenter:
    """A center as its shards' checkpoints have it."""

    values: Mapping[str, NDArray[Any]]  # by name
    version: int


def read_stored(place: str) -> StoredCenter:
    """Return the center whose shards have kept checkpoints in a storage.

    Raises:
        CheckpointError: there is none, or a part of it is missing.
    """
    if "://" not in place and not Path(place).is_dir():  # a storage would be made
        raise CheckpointError(f"There is no center in {place}.")
    storage = Storage(place)
    description = find_center(storage)
    if description is None:
        raise CheckpointError(f"There is no center in {place}.")
    with reading(place, "Is there a copy of it?", CheckpointError):
        return _gather(storage, description)


def _gather(storage: Storage, description: dict[str, Any]) -> StoredCenter:
    plan, place = Plan.from_json(description["plan"]), storage.place
    center = plan.layout.allocate()
    known: list[tuple[dict[int, RankProgress], int]] = []
    for k, ranges in enumerate(cut(plan, description["asked"])):
        saved = storage.read(f"shard-{k}")
        if saved is None:
            raise CheckpointError(f"There is no whole checkpoint of shard {k} in {place}.")
        header, tensors = saved
        start, stop = span(ranges)
        center[start:stop] = tensors["center"]
        known.append((Ledger.from_json(header["rows"]).rows(), header["round"]))
    rows, closed = latest(known)
    done = closed if plan.rounds else sum(row.exchanges for row in rows.values())
    return StoredCenter(plan.layout.views(center), int(description["base"]) + done)


def _copy_state(
    plan: Plan, start: int, stop: int, part: Bytes, whole: Bytes, into_whole: bool
) -> None:
    """Copy the outer optimizer's state of one part of the center to or from that of the whole."""
    of_whole = {(s.parameter, s.key): s for s in plan.state}
    for s in plan.state_within(start, stop):
        mine, ours = s.view(part), of_whole[s.parameter, s.key].view(whole)
        np.copyto(ours, mine) if into_whole else np.copyto(mine, ours)
