"""A center on a Ray cluster: head and shards are named, detached actors that Ray starts again.

They outlive the processes that made them, and retire by themselves, saved, when nobody has been a
member for a while. Ray's own repeats are off: a call is repeated by whoever made it, and a shard
knows a repeat (`served/shard.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from springline.center.center import check_layout, check_settings
from springline.center.errors import CenterError
from springline.center.layout import Layout
from springline.center.plan import Plan
from springline.center.ray_actors import (
    NAMESPACE,
    NodeAffinitySchedulingStrategy,
    RayHead,
    RayPeer,
    RayShard,
    connect,
    find,
    head_name,
    head_peer,
    ray,
    shard_name,
    shard_peers,
    shards_named,
)
from springline.center.served.center import ServedCenter, first_parts
from springline.center.served.head import GRACE
from springline.center.served.messages import Row, cut
from springline.center.served.peer import Call, PeerLostError
from springline.rules.rule import Rule

_log = logging.getLogger("springline")
__all__ = ["NAMESPACE", "RayCenter", "connect"]
LINGER = 600.0  # seconds without a member after which a center saves itself and retires
_RETIRING = 300.0  # seconds that saving all shards may take
_PROCESS = 150e6  # bytes of memory that an actor's process takes, beside what it holds
_SHARD = 256e6  # bytes of the center that a shard holds at most, by default


class RayCenter(ServedCenter):
    """A center on a Ray cluster. Make one with `create_or_join` or `open`."""

    by_path: ClassVar[bool] = True  # by its name

    def __init__(self, name: str, description: Mapping[str, Any], handles: Sequence[Any]) -> None:
        head, *shards = handles
        super().__init__(description, head_peer(name, head), shard_peers(name, shards))
        self.name = name

    @classmethod
    def create_or_join(
        cls,
        name: str,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        *,
        use_locking: bool = True,
        restore: str | Path | None = None,
        address: str | None = None,
        shards: int | None = None,
        storage: str | None = None,
        every: tuple[int, float] = (100, 10.0),
        grace: float = GRACE,
        linger: float = LINGER,
    ) -> RayCenter:
        """Open the center of that name, which is made by whoever comes first.

        Args:
            name: the center's.
            layout: the worker's model; refused if it is not the center's.
            rule: the worker's; refused if it is not the center's.
            values: the first values, by name. Only the one that makes the center gives them.
            use_locking: whether an exchange is atomic, per shard.
            restore: a checkpoint whose values a new center takes instead.
            address: of the cluster; by default the one that this process is in.
            shards: into how many the center is cut; by default one per machine, at least two,
                and so many that none holds more than 256 MB.
            storage: where shards keep checkpoints, from which they go on when they are started
                again: a directory that all machines see, or an fsspec URL. Without one, a shard
                that dies ends the run.
            every: exchanges, and seconds, between two checkpoints of a shard, whichever comes
                first. So much is lost, at most, of the part that a shard holds, when it dies.
            grace: seconds without a sign of life after which a worker counts as dead.
            linger: seconds without a worker after which the center saves itself and retires.
        """
        connect(address)
        if storage and "://" not in storage:
            storage = str(Path(storage).absolute())
        plan = Plan.of(layout, rule, use_locking)
        about = name, storage, grace, linger
        head = _actor(RayHead, head_name(name), 1000, "SPREAD", *about)
        peer, who = head_peer(name, head), uuid.uuid4().hex
        while (description := Call(peer, "claim", who).result()) is None:
            with _at_it(peer, who):
                made = _make(name, plan, rule, values, restore, shards, storage, every)
                Call(peer, "publish", who, made).result()
        held = Plan.from_json(description["plan"])
        check_layout(held.layout, layout)
        check_settings(held.settings, plan.settings)
        handles = _shards(name, held, rule, description)
        center = cls(name, description, [head, *handles])
        if description["digest"] != _digest(layout, values):
            _log.warning(
                "Joined the center %s at version %d: its values replace this worker's own.",
                name,
                center.version,
            )
        return center

    @classmethod
    def open(cls, name: str, address: str | None = None) -> RayCenter:
        """Open a center that is there, whatever its model: to read, to save, to watch."""
        connect(address)
        nobody = CenterError(f"There is no center {name!r} on the cluster.")
        try:
            head = find(head_name(name))
            look = Call(head_peer(name, head), "look").result()
            count = look.description["shards"] if look else 0
            handles = [find(shard_name(name, k)) for k in range(count)]
        except (CenterError, ValueError) as error:  # it may end this very moment
            raise nobody from error
        if look is None:
            raise nobody
        return cls(name, look.description, [head, *handles])

    def retire(self) -> None:
        """Save every shard to the storage, and end the center's actors."""
        self.close()
        pending = self.head.ask("retire")
        deadline = time.monotonic() + _RETIRING
        while time.monotonic() < deadline:
            try:
                pending.result(1.0)
            except TimeoutError:
                continue
            except (PeerLostError, CenterError):
                return  # the head has ended before it could answer
            return
        raise CenterError(f"The center {self.name!r} could not be saved and ended in time.")


def _actor(kind: type, name: str, concurrency: int, where: Any, *arguments: Any) -> Any:
    """Make an actor, or find the one of that name."""
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": concurrency,
        "scheduling_strategy": where,
    }
    return ray.remote(kind).options(**options).remote(*arguments)


def _make(
    name: str,
    plan: Plan,
    rule: Rule,
    values: Mapping[str, Any],
    restore: str | Path | None,
    shards: int | None,
    storage: str | None,
    every: tuple[int, float],
) -> dict[str, Any]:
    """Make the shards of a new center; return what the head is to tell about it."""
    asked = _how_many(plan, shards)
    parts, version, steps = first_parts(plan, values, asked, restore)
    description = {
        "plan": plan.to_json(),
        "asked": asked,
        "shards": len(parts),
        "base": version,
        "digest": _digest(plan.layout, values),
        "storage": storage,
        "every": list(every),
    }
    _end_what_is_left(name)
    handles = _shards(name, plan, rule, description)
    try:
        peers = zip(shard_peers(name, handles), parts, strict=True)
        calls = [Call(peer, "initialise", *part, steps) for peer, part in peers]
        for call in calls:
            call.result()
    except BaseException:
        for handle in handles:
            ray.kill(handle)
        raise
    return description


@contextlib.contextmanager
def _at_it(head: RayPeer, who: str) -> Iterator[None]:
    """Say again and again that we are making the center; let another, if we could not."""
    done = threading.Event()

    def say() -> None:
        while not done.wait(5.0):
            head.tell("claim", who)

    threading.Thread(target=say, name="springline claim", daemon=True).start()
    try:
        yield
    except BaseException:
        Call(head, "release", who).result()
        raise
    finally:
        done.set()


def _end_what_is_left(name: str) -> None:
    """End the shards of somebody who was killed while making the center."""
    for actor, handle in shards_named(name).items():
        rows: dict[int, Row] = {}
        with contextlib.suppress(CenterError):  # one that could not start has none
            rows, _ = Call(RayPeer(actor, actor, handle), "rows").result()
        if any(row.incarnation for row in rows.values()):
            raise CenterError(
                f"The center {name!r} has been trained, but its head was started again without a "
                "storage and does not know it any more. Start a new run, with a storage "
                "(`--storage`)."
            )
        ray.kill(handle)


def _digest(layout: Layout, values: Mapping[str, Any]) -> int:
    """Return a checksum of a worker's own values."""
    digest = 0
    for entry in layout.entries:
        value: Any = np.ascontiguousarray(values[entry.name], entry.center_dtype)
        digest = zlib.crc32(value.reshape(-1).view(np.uint8), digest)
    return digest


def _shards(name: str, plan: Plan, rule: Rule, description: Mapping[str, Any]) -> list[Any]:
    asked, storage, every = (description[key] for key in ("asked", "storage", "every"))
    arguments = [
        (description["plan"], rule, k, asked, storage, tuple(every))
        for k in range(description["shards"])
    ]
    concurrency = plan.workers + 8
    # Each on the next machine, for as long as that is there. Ray's own spreading looks at CPUs,
    # of which shards ask for none.
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
    return [
        _actor(RayShard, shard_name(name, k), concurrency, places[k % len(places)], *given)
        for k, given in enumerate(arguments)
    ]


def _how_many(plan: Plan, shards: int | None) -> int:
    """Return into how many shards to cut a center; refuse more than there is memory for."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    held = plan.layout.nbytes + plan.state_nbytes
    if shards is None:
        shards = max(2, nodes, int(-(-held // _SHARD)))
    if shards < 1:
        raise CenterError(f"`shards` must be an integer >= 1. Received: {shards}.")
    memory = ray.cluster_resources().get("memory", 0.0)
    slots = plan.workers if plan.synchronous else 2  # messages and replies on their way
    needed = len(cut(plan, shards)) * _PROCESS + held + slots * plan.layout.nbytes
    if needed > memory:
        raise CenterError(
            f"A center of {held / 1e9:.3g} GB in {shards} shards needs about {needed / 1e9:.3g} GB "
            f"of memory; the cluster has {memory / 1e9:.3g} GB. Use fewer shards, or add machines."
        )
    return shards
