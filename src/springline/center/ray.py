"""A center on a Ray cluster: head and shards are named, detached actors that Ray starts again.

They outlive the processes that made them, and retire by themselves, saved, when nobody has been a
member for a while. Ray's own repeats are off: a call is repeated by whoever made it, and a shard
knows a repeat (`served/shard.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from springline.center.center import check_settings
from springline.center.errors import CenterError
from springline.center.layout import Layout
from springline.center.plan import Plan
from springline.center.served.center import ServedCenter, first_parts
from springline.center.served.head import GRACE, Head, latest
from springline.center.served.messages import Reply, Row, cut
from springline.center.served.peer import Call, PeerLostError
from springline.center.served.shard import Shard
from springline.rules.rule import Rule

try:
    import ray
    from ray.exceptions import (
        GetTimeoutError,
        ObjectLostError,
        RayActorError,
        RayTaskError,
    )
except ImportError as missing:
    raise ImportError(
        "A center on many machines needs Ray. Install it on every machine: "
        "`pip install springline[ray]`."
    ) from missing

NAMESPACE = "springline"
LINGER = 600.0  # seconds without a member after which a center saves itself and retires
_RETIRING = 300.0  # seconds that saving all shards may take
_PROCESS = 150e6  # bytes of memory that an actor's process takes, beside what it holds
_SHARD = 256e6  # bytes of the center that a shard holds at most, by default
_INLINE = 100_000  # bytes that Ray sends along with an answer
_MALLOC = ((-1, 2**31 - 1), (-3, 2**30))  # glibc: keep freed memory; reuse it for large arrays


class RayPeer:
    """An actor, by its name."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def ask(self, method: str, *arguments: Any) -> _Pending:
        """Begin a call."""
        return _Pending(getattr(self._handle, method).remote(*arguments))

    def tell(self, method: str, *arguments: Any) -> None:
        """Make a call whose answer nobody waits for."""
        getattr(self._handle, method).options(num_returns=0).remote(*arguments)


class _Pending:
    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def result(self, timeout: float) -> Any:
        try:
            return _whole(ray.get(self._ref, timeout=timeout), timeout)
        except GetTimeoutError as error:
            raise TimeoutError from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (RayActorError, ObjectLostError) as error:
            first, *_, last = (*str(error).splitlines(), "")
            if "creation task" in first:
                raise CenterError(f"A part of the center could not start: {last}") from error
            raise PeerLostError(first) from error


def _whole(answer: Any, timeout: float) -> Any:
    """Return an answer with its data, for which a reference may stand."""
    if isinstance(answer, Reply) and isinstance(answer.data, ray.ObjectRef):
        return replace(answer, data=ray.get(answer.data, timeout=timeout))
    return answer


class _RayShard(Shard):
    def __init__(self, *arguments: Any) -> None:
        if sys.platform == "linux":
            for parameter, value in _MALLOC:
                ctypes.CDLL(None).mallopt(parameter, value)
        super().__init__(*arguments)

    def snapshot(self) -> Any:
        """Copy the center into Ray's own memory, once, instead of returning a copy to be copied."""
        return ray.put(self._center) if len(self._center) > _INLINE else super().snapshot()


class _RayHead(Head):
    def __init__(self, name: str, storage: str | None, grace: float, linger: float) -> None:
        super().__init__(self._ask_shards, storage, grace)
        self._name = name
        self._linger = linger
        self._watch = asyncio.ensure_future(self._retire_when_idle())

    async def _ask_shards(self, count: int) -> tuple[dict[int, Row], int]:
        handles = [_handle(_shard_name(self._name, k)) for k in range(count)]
        return latest(await asyncio.gather(*[handle.rows.remote() for handle in handles]))

    async def _retire_when_idle(self) -> None:
        seen = time.monotonic()
        while time.monotonic() - seen < self._linger:
            await asyncio.sleep(min(1.0, self._linger / 4))
            if self._alive():
                seen = time.monotonic()
        await self.retire()

    async def retire(self) -> None:
        """Save every shard and end them all, and then this head."""
        for k in range((self._description or {}).get("shards", 0)):
            try:
                handle = _handle(_shard_name(self._name, k))
                await handle.save.remote()
                ray.kill(handle)
            except (ValueError, RayActorError):
                continue  # it is gone
        ray.kill(_handle(_head_name(self._name)))


class RayCenter(ServedCenter):
    """A center on a Ray cluster. Make one with `create_or_join` or `open`."""

    by_path: ClassVar[bool] = True  # by its name

    def __init__(self, name: str, description: Mapping[str, Any], handles: Sequence[Any]) -> None:
        head, *shards = handles
        peers = [RayPeer(f"shard {k} of the center", shard) for k, shard in enumerate(shards)]
        super().__init__(description, RayPeer("the center's head", head), peers)
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
        plan = Plan.of(layout, rule, use_locking)
        head = _actor(_RayHead, _head_name(name), 1000, name, storage, grace, linger)
        peer, who = RayPeer("the center's head", head), uuid.uuid4().hex
        description = Call(peer, "claim", who).result()
        if description is None:
            try:
                description = _make(name, plan, rule, values, restore, shards, storage, every)
                Call(peer, "publish", who, description).result()
            except BaseException:
                Call(peer, "release", who).result()
                raise
        held = Plan.from_json(description["plan"])
        handles = _shards(name, held, rule, description)
        center = cls(name, description, [head, *handles])
        center.check_layout(layout)
        check_settings(center.settings, plan.settings)
        return center

    @classmethod
    def open(cls, name: str, address: str | None = None) -> RayCenter:
        """Open a center that is there, whatever its model: to read, to save, to watch."""
        connect(address)
        nobody = CenterError(f"There is no center {name!r} on the cluster.")
        try:
            head = _handle(_head_name(name))
            look = Call(RayPeer("the center's head", head), "look").result()
            count = look.description["shards"] if look else 0
            handles = [_handle(_shard_name(name, k)) for k in range(count)]
        except ValueError as error:
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
            except PeerLostError:
                pass  # the head has ended before it could answer
            return
        raise CenterError(f"The center {self.name!r} could not be saved and ended in time.")


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster, unless it is.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`; None for the one this process is in.
    """
    if ray.is_initialized():
        return
    address = address or "auto"
    where = "this machine" if address == "auto" else address
    problem = CenterError(
        f"There is no Ray cluster at {where}. Start one with `ray start --head` on one machine and "
        "`ray start --address HOST:6379` on the others, or give the address of one that runs."
    )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise problem from error
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise problem from error


def _head_name(name: str) -> str:
    return f"{name}/head"


def _shard_name(name: str, number: int) -> str:
    return f"{name}/shard-{number}"


def _handle(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def _actor(kind: type, name: str, concurrency: int, *arguments: Any) -> Any:
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
        "scheduling_strategy": "SPREAD",
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
        "storage": storage,
        "every": list(every),
    }
    handles = _shards(name, plan, rule, description)
    try:
        peers = [RayPeer(f"shard {k} of the center", h) for k, h in enumerate(handles)]
        calls = [Call(p, "initialise", *part, steps) for p, part in zip(peers, parts, strict=True)]
        for call in calls:
            call.result()
    except BaseException:
        for handle in handles:
            ray.kill(handle)
        raise
    return description


def _shards(name: str, plan: Plan, rule: Rule, description: Mapping[str, Any]) -> list[Any]:
    asked, storage, every = (description[key] for key in ("asked", "storage", "every"))
    arguments = [
        (description["plan"], rule, k, asked, storage, tuple(every))
        for k in range(description["shards"])
    ]
    concurrency = plan.workers + 8
    return [
        _actor(_RayShard, _shard_name(name, k), concurrency, *given)
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
