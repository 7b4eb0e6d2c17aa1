"""The actors of a center on a Ray cluster, and how they are called."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from springline.center.errors import CenterError
from springline.center.served.head import Head
from springline.center.served.messages import Reply, Row, latest
from springline.center.served.peer import PeerLostError
from springline.center.served.shard import Shard

try:
    import ray as ray  # for whoever needs it: here it is said how to install it
    from ray.exceptions import (
        GetTimeoutError,
        ObjectLostError,
        RayActorError,
        RayError,
        RayTaskError,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy as NodeAffinitySchedulingStrategy,
    )
except ImportError as missing:
    raise ImportError(
        "A center on many machines needs Ray. Install it on every machine: "
        "`pip install springline[ray]`."
    ) from missing

NAMESPACE = "springline"
_PAUSE = 0.2  # seconds before an actor that is away is asked again
_SAVING = 60.0  # seconds that a shard may take to write itself for the last time
_FIRST = 120.0  # seconds that the first member may take to come, at least
_INLINE = 100_000  # bytes that Ray sends along with an answer
_log = logging.getLogger("springline")
_MALLOC = ((-1, 2**31 - 1), (-3, 2**30))  # glibc: keep freed memory; reuse it for large arrays


class RayPeer:
    """An actor.

    Args:
        name: what it is called in messages.
        actor: its name on the cluster.
        handle: the actor.
    """

    def __init__(self, name: str, actor: str, handle: Any) -> None:
        self.name = name
        self.actor = actor
        self._handle = handle
        self._probe: Any = None  # the question which life it is in, until it is answered

    def ask(self, method: str, *arguments: Any) -> _Pending:
        """Begin a call."""
        return _Pending(self, getattr(self._handle, method).remote(*arguments))

    async def answer(self, method: str, *arguments: Any) -> Any:
        """Make a call, again and again while the actor is away, from another actor."""
        while True:
            try:
                return await getattr(self._handle, method).remote(*arguments)
            except RayActorError as error:
                lost = self.lost(error)
                if not isinstance(lost, PeerLostError):
                    raise lost from error
            await asyncio.sleep(_PAUSE)

    def tell(self, method: str, *arguments: Any) -> None:
        """Make a call whose answer nobody waits for."""
        getattr(self._handle, method).options(num_returns=0).remote(*arguments)

    def has_restarted(self, life: str) -> bool:
        """Whether a shard is known to be in another life than that one; does not wait."""
        if self._probe is None:
            self._probe = self._handle.in_life.remote()
        try:
            now = ray.get(self._probe, timeout=0)
        except GetTimeoutError:
            return False  # it is away, or has not answered yet
        except RayActorError:
            now = life  # ask again
        self._probe = None
        return bool(now != life)

    def lost(self, error: Exception) -> Exception:
        """Return what a call to an actor that is gone raises: whether it comes back, or not."""
        lines = [line for line in str(error).splitlines() if line.strip()]
        if "creation task" in lines[0]:
            return CenterError(f"{self.name.capitalize()} could not start: {lines[-1]}")
        try:
            find(self.actor)
        except ValueError:
            return CenterError(
                f"{self.name.capitalize()} is gone for good: the center was ended. Start the run "
                "again; it goes on from its storage, if it has one."
            )
        return PeerLostError(lines[0])


class _Pending:
    def __init__(self, peer: RayPeer, ref: Any) -> None:
        self._peer = peer
        self._ref = ref
        self._answer: Any = None

    def result(self, timeout: float) -> Any:
        try:
            self._answer = ray.get(self._ref, timeout=timeout)
            return _whole(self._answer, timeout)
        except GetTimeoutError as error:
            if self._is_lost():
                raise PeerLostError("it was started again before its answer was here") from error
            raise TimeoutError from error
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (RayActorError, ObjectLostError) as error:
            raise self._peer.lost(error) from error

    def _is_lost(self) -> bool:
        """Whether the answer's data has gone with its shard: Ray may take minutes to notice."""
        data = getattr(self._answer, "data", None)
        return isinstance(data, Stored) and self._peer.has_restarted(data.life)


@dataclass(frozen=True)
class Stored:
    """What stands for an answer's data: where it is, and the life of the shard that put it there.

    The life is drawn by a shard when it starts.
    """

    ref: Any
    life: str


def _whole(answer: Any, timeout: float) -> Any:
    """Return an answer with its data, for which a reference may stand."""
    if isinstance(answer, Reply) and isinstance(answer.data, Stored):
        return replace(answer, data=ray.get(answer.data.ref, timeout=timeout))
    return answer


class RayShard(Shard):
    """A shard in an actor."""

    def __init__(self, *arguments: Any) -> None:
        if sys.platform == "linux":
            for parameter, value in _MALLOC:
                ctypes.CDLL(None).mallopt(parameter, value)
        self._life = uuid.uuid4().hex
        super().__init__(*arguments)

    def in_life(self) -> str:
        """Return what is drawn anew whenever the shard is started."""
        return self._life

    def snapshot(self) -> Any:
        """Copy the center into Ray's own memory, once, instead of returning a copy to be copied."""
        return self.send(self._center if len(self._center) > _INLINE else super().snapshot())

    def send(self, copy: Any) -> Any:
        """Let what is sent stand for itself if it is small."""
        return Stored(ray.put(copy), self._life) if len(copy) > _INLINE else copy


class RayHead(Head):
    """A head in an actor.

    Args:
        name: the center's.
        storage: where it writes down what the center is, if anywhere.
        grace: seconds without a sign of life after which a member counts as dead.
        linger: seconds without a member after which the center saves itself and retires.
    """

    def __init__(self, name: str, storage: str | None, grace: float, linger: float) -> None:
        super().__init__(self._ask_shards, storage, grace)
        self._name = name
        self._linger = linger
        self._watch = asyncio.ensure_future(self._retire_when_idle())

    async def _ask_shards(self, count: int) -> tuple[dict[int, Row], int]:
        try:
            handles = [find(shard_name(self._name, k)) for k in range(count)]
        except ValueError as error:
            raise CenterError(
                f"The shards of the center {self._name!r} are not there; the next worker to join "
                "starts them from its storage."
            ) from error
        calls = [peer.answer("rows") for peer in shard_peers(self._name, handles)]
        return latest(await asyncio.gather(*calls))

    async def _retire_when_idle(self) -> None:
        seen, linger = time.monotonic(), max(self._linger, _FIRST)
        while time.monotonic() - seen < linger:
            await asyncio.sleep(min(1.0, self._linger / 4))
            if self._seats.alive():
                seen = time.monotonic()
            if any(row.incarnation for row in self._rows.values()):  # somebody has come
                linger = self._linger
        await self.retire()

    async def retire(self) -> None:
        """Save every shard and end them all, and then this head."""
        self._ending = True
        for actor, handle in shards_named(self._name).items():
            try:
                await asyncio.wait_for(RayPeer(actor, actor, handle).answer("save"), _SAVING)
            except (CenterError, RayError, asyncio.TimeoutError) as error:
                _log.warning("%s ends without a last checkpoint: %s", actor, error)
            ray.kill(handle)
        ray.kill(find(head_name(self._name)))


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
    except ConnectionAbortedError as error:  # said by the server for clients, so there is one
        raise CenterError(
            f"The Ray cluster at {address} does not let clients in: its server for them could not "
            "start (logs/ray_client_server*.err on its head node). Start that node with "
            "`GRPC_ENABLE_FORK_SUPPORT=0 ray start --head`, which helps with a recent grpcio."
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise problem from error


def head_name(name: str) -> str:
    """Return what the head of a center is called on the cluster."""
    return f"{name}/head"


def shard_name(name: str, number: int) -> str:
    """Return what a shard of a center is called on the cluster."""
    return f"{name}/shard-{number}"


def shards_named(name: str) -> dict[str, Any]:
    """Return all shards of a center that are on the cluster, by their names there."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{name}/shard-"):
            with contextlib.suppress(ValueError):  # it has just ended
                found[actor["name"]] = find(actor["name"])
    return found


def head_peer(name: str, handle: Any) -> RayPeer:
    """Return a center's head, to be called."""
    return RayPeer("the center's head", head_name(name), handle)


def shard_peers(name: str, handles: Sequence[Any]) -> list[RayPeer]:
    """Return a center's shards, to be called."""
    return [
        RayPeer(f"shard {k} of the center", shard_name(name, k), handle)
        for k, handle in enumerate(handles)
    ]


def find(name: str) -> Any:
    """Return an actor by its name on the cluster; ValueError if there is none."""
    return ray.get_actor(name, namespace=NAMESPACE)
