"""The actors of a center on a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from springline.center.ray_peer import (
    NAMESPACE,
    PAUSE,
    NodeAffinitySchedulingStrategy,
    RayError,
    RayPeer,
    door,
    find,
    head_name,
    homes,
    ray,
    shard_name,
    shard_peers,
    shards_named,
)
from springline.center.remote.head import Head
from springline.center.remote.interceptor import Interceptor
from springline.center.remote.messages import Look, RankProgress, latest
from springline.center.remote.shard import Shard
from springline.errors import CenterError, EndedError, TokenError, forgotten
from springline.rules.rule import Rule

_SAVING = 60.0  # seconds that a shard may take to write itself for the last time
_FIRST = 120.0  # seconds that the first member may take to come, at least
_SEEN = 10.0  # seconds until what was written on one machine is seen on another
_CALLS = 16  # at once in a shard. None waits for one that is still to come: others queue in Ray.
_log = logging.getLogger("springline")


class ShardActor:
    """A shard in an actor, behind an interceptor: `call` is all that others may call."""

    def __init__(self, token: str, *given: Any) -> None:
        self._shard = Shard(*given)
        self._interceptor = Interceptor(self._shard, token, self._shard.ranges)

    def call(self, token: str, method: str, *arguments: Any) -> Any:
        """Call the shard."""
        return self._interceptor.admit(token, method, arguments)(*arguments)

    def __ray_shutdown__(self) -> None:
        """Write a final checkpoint: on SIGTERM Ray lets running calls end, and then calls this."""
        self._shard.save()


class HeadActor:
    """A head in an actor, behind an interceptor: `call` is all that others may call."""

    def __init__(self, token: str, *given: Any) -> None:
        self._interceptor = Interceptor(RayHead(token, *given), token)

    async def call(self, token: str, method: str, *arguments: Any) -> Any:
        """Call the head."""
        return await self._interceptor.admit(token, method, arguments)(*arguments)


class RayHead(Head):
    """A head in an actor; `linger` seconds without a member its center saves itself and retires."""

    calls: ClassVar[tuple[str, ...]] = (
        *Head.calls,
        *("open", "make_shards", "create", "abandon", "retire"),
    )

    def __init__(
        self, token: str, name: str, storage: str | None, grace: float, linger: float
    ) -> None:
        super().__init__(self._ask_shards, storage, grace, name, token)
        self._name = name
        self._linger = linger
        self._making = asyncio.Lock()
        self._wanted = time.monotonic()  # when the center was last asked to stay
        self._watch = asyncio.ensure_future(self._retire_when_idle())

    async def look(self) -> Look | None:
        """Return what is known; None while there is no center, and when it is being ended."""
        return None if self._ending else await super().look()

    async def stay(self, given_up: list[int] | None = None) -> None:
        """Stay for a while, though there may be no members; see `Head.stay`."""
        await super().stay(given_up)
        self._wanted = time.monotonic()

    async def open(self) -> dict[str, Any] | None:
        """Return what the center is; None if there is none: then `create` it, or `abandon` it."""
        try:
            found = self.registration.find()
        except CenterError:
            await self.abandon()
            raise
        if self._ending:
            raise EndedError("The center is being ended. Start the run again.")
        await self.stay()
        return found

    async def make_shards(self, rule: Rule) -> None:
        """Make those shards that are not there: after all had died, or the center had retired."""
        if self._ending:
            raise EndedError("The center is being ended. Start the run again.")
        description = self.registration.description
        if description and self.registration.storage:  # else they would be empty
            self._make_shards(rule, description)

    async def create(
        self, rule: Rule, description: dict[str, Any], parts: Sequence[Any], steps: Sequence[int]
    ) -> dict[str, Any]:
        """Make the center, unless it is there: the first worker to ask gives it its values.

        Each shard's part is a reference to its values and one to its outer optimizer's state.
        """
        async with self._making:
            if found := await self.open():
                return found
            await self._end_what_is_left()
            try:
                handles = self._make_shards(rule, description)
                peers = shard_peers(self._name, handles, self._token)
                pairs = zip(peers, parts, strict=True)
                calls = [peer.answer("initialise", *part, steps) for peer, part in pairs]
                await asyncio.gather(*calls)
                await self._check_storage(len(peers))
                self.registration.publish(description)
            except Exception:
                for handle in shards_named(self._name).values():
                    ray.kill(handle)
                await self.abandon()
                raise
        return description

    def _make_shards(self, rule: Rule, description: Mapping[str, Any]) -> list[Any]:
        """Make those shards that are not there; return all.

        They belong to the same job as this head. Ray forgets the classes of actors whose job has
        ended twice, as that of a machine does that was cut off and comes back, unless the job has
        made at least two actors that live on.
        """
        plan, storage = description["plan"], description["storage"]
        # Each on the next machine, for as long as that is there.
        nodes = sorted(node["NodeID"] for node in homes())
        options: dict[str, Any] = {"max_concurrency": _CALLS}
        if not storage:
            options["max_restarts"] = 0  # it would come back empty
        since = tuple(description["every"]), description["base"]
        made = []
        for k in range(description["shards"]):
            place = NodeAffinitySchedulingStrategy(nodes[k % len(nodes)], soft=True)
            options["scheduling_strategy"] = place
            given = plan, rule, k, description["asked"], storage, *since
            name = shard_name(self._name, k)
            made.append(make_actor(ShardActor, name, options, self._token, *given))
        return made

    async def _end_what_is_left(self) -> None:
        """End the shards of a head that was killed while it made the center."""
        for actor, handle in shards_named(self._name).items():
            rows: dict[int, RankProgress] = {}
            try:
                rows, _ = await RayPeer(actor, actor, handle, self._token).answer("rows")
            except TokenError:  # it is another center's
                raise
            except CenterError:
                pass  # it could not start
            if any(row.incarnation for row in rows.values()):
                raise forgotten(f"The center {self._name!r}")
            ray.kill(handle)

    async def _check_storage(self, shards: int) -> None:
        """Refuse a storage that is another one on the machine of a shard."""
        storage = self.registration.storage
        if storage is None:
            return
        names = [f"shard-{k}" for k in range(shards)]
        deadline = time.monotonic() + _SEEN
        while missing := [name for name in names if not storage.holds(name)]:
            if time.monotonic() > deadline:
                raise CenterError(
                    f"The storage {storage.place} is not the same on all machines: the center's "
                    f"head does not see what {missing[0]} has written. Give a "
                    "directory that every machine of the cluster sees, also those without workers, "
                    "or an fsspec URL."
                )
            await asyncio.sleep(PAUSE)

    async def abandon(self) -> None:
        """Make room for a head with another storage, unless it is in use or there are shards.

        Ray would start this one again with what it was given at first.
        """

        def end() -> None:
            busy = (
                self.registration.description or self._making.locked() or shards_named(self._name)
            )
            if not busy:
                self._ending = True
                ray.kill(find(head_name(self._name)))

        asyncio.get_running_loop().call_later(PAUSE, end)

    async def _ask_shards(self, count: int) -> tuple[dict[int, RankProgress], int]:
        try:
            handles = [find(shard_name(self._name, k)) for k in range(count)]
        except ValueError as error:
            raise CenterError(
                f"The shards of the center {self._name!r} are not there; the next worker to join "
                "starts them from its storage."
            ) from error
        peers = shard_peers(self._name, handles, self._token)
        calls = [peer.answer("rows") for peer in peers]
        return latest(await asyncio.gather(*calls))

    async def _retire_when_idle(self) -> None:
        linger = max(self._linger, _FIRST)
        while time.monotonic() - self._wanted < linger:
            await asyncio.sleep(min(1.0, self._linger / 4))
            if self._membership.alive():
                await self.stay()
            if any(row.incarnation for row in self._rows.values()):  # a worker has come
                linger = self._linger
        await self.retire()

    async def retire(self) -> list[str]:
        """Save every shard and end them all, and then this head.

        Returns:
            Of each shard that could not be saved, why.
        """
        self._ending = True
        failed = []
        for actor, handle in shards_named(self._name).items():
            peer = RayPeer(actor, actor, handle, self._token)
            try:
                await asyncio.wait_for(peer.answer("save"), _SAVING)
            except (EndedError, TokenError):
                continue  # it is gone: another process ends the center, too; or it is another's
            except (CenterError, RayError, asyncio.TimeoutError) as error:
                why = str(error) or f"not written within {_SAVING:.0f} s"
                failed.append(f"{actor}: {why}")
                _log.warning("%s ends without a final checkpoint: %s", actor, why)
            ray.kill(handle)
        head = find(head_name(self._name))
        asyncio.get_running_loop().call_later(PAUSE, ray.kill, head)  # when we have answered
        return failed


def make_actor(kind: type, name: str, given: Mapping[str, Any], *arguments: Any) -> Any:
    """Make an actor with these options beside ours, or find the one of that name."""
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "memory": 1,  # of an actor that asks for nothing at all, Ray minds no place
        "max_restarts": -1,
        "max_task_retries": 0,
        **given,
    }
    with door.inside():
        return ray.remote(kind).options(**options).remote(*arguments)
