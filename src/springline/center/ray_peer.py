"""Ray itself: how to connect to a cluster, and how the actors of a center are found and called."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from springline.center.remote.peer import NotHereError, PeerLostError
from springline.errors import CenterError, EndedError

os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # to connect, of 40 seconds each
try:
    import ray as ray  # imported here only: the error says how to install it
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
    from ray.exceptions import RayError as RayError
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy as NodeAffinitySchedulingStrategy,
    )
except ImportError as missing:
    raise ImportError(
        "A center on many machines needs Ray. Install it on every machine: "
        "`pip install springline[ray]`."
    ) from missing

NAMESPACE = "springline"
CENTER = "springline-center"  # what a node has, for Ray a resource, if shards are to be there
OPTIONS: Mapping[str, Any] = {  # of `ray.init`
    "namespace": NAMESPACE,
    "log_to_driver": False,
    "logging_level": "ERROR",
}
PAUSE = 0.2  # seconds before an actor that is away is asked again
_PATIENCE = 10.0  # seconds for a connection
_log = logging.getLogger("springline")
_LEAVING = 10.0  # seconds; a thread that waits for an answer is out within two


class Door:
    """The way into Ray for the threads of this process, closed before the interpreter ends.

    Ray then frees what a thread that waits for an answer still uses: the process would die of
    SIGSEGV. It takes no lock: a signal's handler may come at any moment.

    Args:
        connected: whether this process is in a cluster. Where it is not, Ray itself would connect
            a new one, even when the interpreter is about to end.
    """

    def __init__(self, connected: Callable[[], bool]) -> None:
        self._connected = connected
        self.renew()

    def renew(self) -> None:
        """Reset in a forked process: the threads that were inside are not there."""
        self._inside: set[object] = set()
        self._closed = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Be inside, for any number of times.

        Raises:
            EndedError: this process leaves, or has left.
        """
        me = object()
        try:
            self._inside.add(me)  # first: `close` either sees us, or is seen
            if self._closed or not self._connected():
                raise EndedError("This process has left the Ray cluster. Start it again.")
            yield
        finally:
            self._inside.discard(me)

    def close(self, patience: float = _LEAVING) -> bool:
        """Let no thread in any more, and wait until all are out; whether they are."""
        self._closed = True
        deadline = time.monotonic() + patience
        while self._inside and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._inside


door = Door(ray.is_initialized)
atexit.register(door.close)  # earlier than what Ray has registered before
os.register_at_fork(after_in_child=door.renew)


class RayPeer:
    """An actor."""

    def __init__(self, name: str, actor: str, handle: Any, token: str) -> None:
        self.name = name  # in messages
        self.actor = actor  # its name on the cluster
        self._handle = handle
        self._token = token

    def ask(self, method: str, *arguments: Any) -> _Pending:
        """Begin a call."""
        with door.inside():
            return _Pending(self, self._handle.call.remote(self._token, method, *arguments))

    async def answer(self, method: str, *arguments: Any) -> Any:
        """Make a call from another actor; retry while the peer is away."""
        while True:
            try:
                return await self._handle.call.remote(self._token, method, *arguments)
            except RayTaskError as error:
                raise _cause(error) from None
            except RayActorError as error:
                lost = self.lost(error)
                if not isinstance(lost, PeerLostError):
                    raise lost from error
            await asyncio.sleep(PAUSE)

    def tell(self, method: str, *arguments: Any) -> None:
        """Make a call without waiting for the answer."""
        with door.inside():
            call = self._handle.call.options(num_returns=0)
            call.remote(self._token, method, *arguments)

    def lost(self, error: Exception) -> Exception:
        """Return what a call to an actor that is gone raises: whether it comes back, or not."""
        lines = [line for line in str(error).splitlines() if line.strip()]
        if "creation task" in lines[0]:
            return CenterError(f"{self.name.capitalize()} could not start: {lines[-1]}")
        try:
            same = find(self.actor)._actor_id == self._handle._actor_id
        except ValueError:
            same = False
        if same:
            return PeerLostError(lines[0])
        return EndedError(
            f"{self.name.capitalize()} is gone for good: the center was ended. Start the run "
            "again; it goes on from its storage, if it has one."
        )


class _Pending:
    def __init__(self, peer: RayPeer, ref: Any) -> None:
        self._peer = peer
        self._ref = ref

    def result(self, timeout: float) -> Any:
        # We wait before we get: a `ray.get` that runs out of time throws away what has already come
        # over the network, and what takes longer than that would never be here.
        try:
            with door.inside():
                if not ray.wait([self._ref], timeout=timeout, fetch_local=True)[0]:
                    raise NotHereError
                return ray.get(self._ref)
        except RayTaskError as error:
            raise _cause(error) from None
        except (RayActorError, ObjectLostError) as error:
            raise self._peer.lost(error) from error


def _cause(error: RayTaskError) -> Exception:
    return error.cause if isinstance(error.cause, Exception) else error


def _recorded() -> str | None:
    """Return what `auto` stands for, if that is written down somewhere."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    found = os.environ.get("RAY_ADDRESS")
    with contextlib.suppress(OSError):
        found = found or Path(folder, "ray", "ray_current_cluster").read_text("utf-8").strip()
    return None if found == "auto" else found or None


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster, unless it is.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`; None for the one this process is in.
    """
    if ray.is_initialized():
        return
    address = address or "auto"
    there = _recorded() if address == "auto" else address
    where = f"at {there}" if there else "on this machine"
    if there != address and there:
        where += ", the last one that Ray knows on this machine (`ray stop` forgets it)"
    no_cluster = CenterError(
        f"There is no Ray cluster {where}. Start one with `ray start --head` on one machine and "
        "`ray start --address HOST:6379` on the others, or give the address of one that runs (not "
        "that of its dashboard, port 8265)."
    )
    if there:  # without a listener Ray itself would try for 14 minutes
        host, _, port = there.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        except (OSError, OverflowError, ValueError) as error:
            raise no_cluster from error
    words = f"Waiting for the Ray cluster {where}, for a minute or two at most."
    waiting = threading.Timer(_PATIENCE, _log.warning, [words])
    waiting.daemon = True
    waiting.start()
    try:
        ray.init(address=address, **OPTIONS)
    except ConnectionAbortedError as error:  # from the server for clients, so there is one
        raise CenterError(
            f"The Ray cluster {where} does not let clients in: its server for them could not start "
            "(logs/ray_client_server*.err on its head node). Start that node with "
            "`GRPC_ENABLE_FORK_SUPPORT=0 ray start --head`, which helps with a recent grpcio."
        ) from error
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        if "InvalidAuthToken" in f"{error} {error.__cause__}" or isinstance(error, RayError):
            raise CenterError(
                f"The Ray cluster {where} asks for a token. Set RAY_AUTH_MODE=token on every "
                "machine, and copy ~/.ray/auth_token from one that has it."
            ) from error
        if address == "auto":
            raise no_cluster from error
        reason = str(error).strip().rstrip(".") or "it is of another kind, or of another version"
        raise CenterError(
            f"Cannot join the Ray cluster at {address}: {reason}. Every machine needs the same "
            "versions of Ray and Python and a node of the cluster (`ray start --address "
            "HOST:6379`); from a machine without one, use ray://HOST:10001 or `ray job submit`."
        ) from error
    finally:
        waiting.cancel()


def head_name(name: str) -> str:
    """Return what the head of a center is called on the cluster."""
    return f"{name}/head"


def shard_name(name: str, number: int) -> str:
    """Return what a shard of a center is called on the cluster."""
    return f"{name}/shard-{number}"


def shards_named(name: str) -> dict[str, Any]:
    """Return all shards of a center that are on the cluster, by their names there."""
    found = {}
    with door.inside():
        actors = ray.util.list_named_actors(all_namespaces=True)
    for actor in actors:
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"{name}/shard-"):
            with contextlib.suppress(ValueError):  # it has just ended
                found[actor["name"]] = find(actor["name"])
    return found


def homes() -> list[dict[str, Any]]:
    """Return the nodes that shards are for: those that were started for it, or all."""
    util: Any = ray  # `nodes` has no types
    nodes = [node for node in util.nodes() if node["Alive"]]
    return [node for node in nodes if node["Resources"].get(CENTER)] or nodes


def head_peer(name: str, handle: Any, token: str) -> RayPeer:
    """Return a center's head, to be called."""
    return RayPeer("the center's head", head_name(name), handle, token)


def shard_peers(name: str, handles: Sequence[Any], token: str) -> list[RayPeer]:
    """Return a center's shards, to be called."""
    return [
        RayPeer(f"shard {k} of the center", shard_name(name, k), handle, token)
        for k, handle in enumerate(handles)
    ]


def find(name: str) -> Any:
    """Return an actor by its name on the cluster; ValueError if there is none."""
    with door.inside():
        return ray.get_actor(name, namespace=NAMESPACE)
