"""A center on a Ray cluster: head and shards are named, detached actors that Ray restarts.

They outlive the processes that made them, and retire by themselves, saved, when there has been no
member for a while. Ray's own retries are off: a call is retried by its caller, and a shard
recognises a retry (`remote/shard.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from springline.center.center import check_plan
from springline.center.layout import Layout
from springline.center.plan import Plan
from springline.center.ray_actors import HeadActor, make_actor
from springline.center.ray_peer import (
    NAMESPACE,
    PAUSE,
    connect,
    find,
    head_name,
    head_peer,
    homes,
    ray,
    shard_name,
    shard_peers,
)
from springline.center.remote.center import RemoteCenter, first_parts
from springline.center.remote.head import GRACE
from springline.center.remote.messages import cut
from springline.center.remote.peer import Call
from springline.center.token import new_token
from springline.errors import CenterError, EndedError, TokenError
from springline.rules.rule import Rule

_log = logging.getLogger("springline")
__all__ = ["NAMESPACE", "RayCenter", "connect"]
LINGER = 600.0  # seconds without a member after which a center saves itself and retires
_PROCESS = 150e6  # bytes of memory that an actor's process takes, beside what it holds
_SHARD = 256e6  # bytes of the center that a shard holds at most, by default
_CALLS = 1000  # that a head takes at once, beside two of each worker: a wait and a heartbeat
_ENDING = 30.0  # seconds that a head may take to be gone
_RETIRING = 300.0  # seconds that saving all shards may take


class RayCenter(RemoteCenter):
    """A center on a Ray cluster. Make one with `create_or_join` or `open`.

    Attributes:
        name: the center's.
        token: the secret that was made with it, which everyone who joins or opens it must give.
    """

    def __init__(
        self, name: str, description: Mapping[str, Any], handles: Sequence[Any], token: str
    ) -> None:
        head, *shards = handles
        peers = head_peer(name, head, token), shard_peers(name, shards, token)
        super().__init__(description, *peers)
        self.name = name
        self.token = token

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
        join: bool = False,
        token: str | None = None,
    ) -> RayCenter:
        """Open the center of that name; the first worker makes it.

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
            grace: seconds without a heartbeat after which a worker counts as dead.
            linger: seconds without a worker after which the center saves itself and retires.
            join: whether the center is known to have been made: it is not made again.
            token: a secret that all workers of the center share. By default a new one, for the
                one that makes the center to hand on (`center.token`).
        """
        connect(address)
        if storage and "://" not in storage:
            storage = str(Path(storage).absolute())
        plan = Plan.of(layout, rule, use_locking)
        token = token or new_token()
        about = (token, name, storage, grace, linger), plan.workers
        head, description = _call_head(*about, "open")
        if description is None:
            asked = restore, shards, storage, every, join
            try:
                made = _new_center(name, plan, values, *asked)
            except BaseException:
                head_peer(name, head, token).tell("abandon")
                raise
            head, description = _call_head(*about, "create", rule, *made)
        if storage and storage != description["storage"]:
            raise CenterError(
                f"The center {name!r} has {_storage(description['storage'])}; this worker was "
                f"given {_storage(storage)}. Another run made it: end that run, or give all its "
                "workers the same storage."
            )
        check_plan(Plan.from_json(description["plan"]), plan)
        Call(head_peer(name, head, token), "make_shards", rule).result()
        handles = [find(shard_name(name, k)) for k in range(description["shards"])]
        return cls(name, description, [head, *handles], token)

    @classmethod
    def open(cls, name: str, address: str | None = None, token: str | None = None) -> RayCenter:
        """Open a center that is there, whatever its model: to read, to save, to watch.

        Args:
            name: the center's.
            address: of the cluster; by default the one that this process is in.
            token: the center's: `center.token` of its maker, or `read_token(RUN)`.
        """
        connect(address)
        token = token or ""
        try:
            head = find(head_name(name))
            look = Call(head_peer(name, head, token), "look").result()
            count = look.description["shards"] if look else 0
            handles = [find(shard_name(name, k)) for k in range(count)]
        except TokenError:
            raise
        except (CenterError, ValueError) as error:  # it may end this very moment
            raise _no_center(name) from error
        if look is None:
            raise _no_center(name)
        return cls(name, look.description, [head, *handles], token)

    def retire(self) -> None:
        """Save every shard to the storage, and end the center's actors."""
        self.close()
        retire(self.name, self.token)


def retire(name: str, token: str) -> None:
    """Save and end what there is of a center.

    Raises:
        CenterError: there is nothing, or it does not answer.
    """
    deadline = time.monotonic() + _RETIRING

    def check() -> None:
        if time.monotonic() > deadline:
            raise CenterError(f"The center {name!r} could not be saved and ended in time.")

    try:
        call = Call(head_peer(name, find(head_name(name)), token), "retire", check=check)
    except ValueError as error:
        raise _no_center(name) from error
    with contextlib.suppress(EndedError):  # the head has ended before it could answer
        failed = call.result()
        if failed:
            more = f" (and of {len(failed) - 1} more)" if failed[1:] else ""
            _log.warning(
                "The storage is older than the center that was saved here: no final checkpoint "
                "of %s%s",
                failed[0],
                more,
            )


def _no_center(name: str) -> CenterError:
    return CenterError(f"There is no center {name!r} on the cluster.")


def _call_head(
    about: tuple[Any, ...], workers: int, method: str, *arguments: Any
) -> tuple[Any, Any]:
    """Call the head, which is made if it is not there; return it, and what it answers.

    A head that is just ending, because its center was ended or could not be made, is waited for.
    """
    (token, name, storage, *_), deadline = about, time.monotonic() + _ENDING
    options: dict[str, Any] = {
        "max_concurrency": _CALLS + 2 * workers,
        "scheduling_strategy": "SPREAD",
    }
    if not storage:
        options["max_restarts"] = 0  # it would not know its center any more
    while True:
        head = make_actor(HeadActor, head_name(name), options, *about)
        try:
            return head, Call(head_peer(name, head, token), method, *arguments).result()
        except EndedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE)


def _new_center(
    name: str,
    plan: Plan,
    values: Mapping[str, Any],
    restore: str | Path | None,
    shards: int | None,
    storage: str | None,
    every: tuple[int, float],
    join: bool,
) -> tuple[dict[str, Any], list[Any], list[int]]:
    """Return what a head needs to make a center: what it is, references to its parts, steps."""
    if join:
        where = f"is not in {storage} any more" if storage else "had no storage"
        raise EndedError(
            f"The center {name!r} is gone, and {where}: the run cannot go on. Start a new one, "
            "with a storage (`--storage`) that all machines see."
        )
    asked = _how_many(plan, shards)
    parts, version, steps = first_parts(plan, values, asked, restore)
    if len(parts) < (shards or 0):
        has = f"{len(parts)} shard{'s' * (len(parts) > 1)}"
        _log.warning("The center has %s: this model cannot be cut into %d.", has, shards)
    description = {
        "name": name,
        "plan": plan.to_json(),
        "asked": asked,
        "shards": len(parts),
        "base": version,
        "storage": storage,
        "every": list(every),
    }
    return description, [[ray.put(array) for array in part] for part in parts], steps


def _storage(place: str | None) -> str:
    return f"the storage {place}" if place else "no storage"


def _how_many(plan: Plan, shards: int | None) -> int:
    """Return into how many shards to cut a center; refuse more than there is memory for."""
    nodes = homes()
    held = plan.layout.nbytes + plan.state_nbytes
    if shards is None:
        shards = max(2, len(nodes), int(-(-held // _SHARD)))
    if shards < 1:
        raise CenterError(f"`shards` must be an integer >= 1. Received: {shards}.")
    memory = sum(node["Resources"].get("memory", 0.0) for node in nodes)
    messages = plan.workers if plan.rounds else 1
    copies = 3 + messages  # its own, and two while checkpoints are written
    needed = len(cut(plan, shards)) * _PROCESS + copies * held
    if needed > memory:
        raise CenterError(
            f"A center of {held / 1e9:.3g} GB in {shards} shards needs about {needed / 1e9:.3g} GB "
            f"of memory; the machines for it have {memory / 1e9:.3g} GB. Use fewer shards, or add "
            "machines."
        )
    return shards
