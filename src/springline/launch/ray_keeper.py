"""What the launcher does for a center on a Ray cluster: names it, watches it, fetches it.

RUN/center/status.json    the last status of the center, for monitors
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from springline.center import CenterError, CheckpointError
from springline.center.ray import RayCenter, retire
from springline.center.ray_peer import door
from springline.center.remote.head import GRACE
from springline.center.remote.messages import Trouble
from springline.center.remote.peer import PeerLostError
from springline.center.remote.registration import find_center
from springline.center.remote.storage import Storage
from springline.center.token import NAME as TOKEN
from springline.cluster_address import ClusterAddress
from springline.errors import TokenError
from springline.launch.directory import CENTER, LaunchError, RunDirectory
from springline.launch.keeper import Keeper
from springline.launch_state import CenterStatus, LaunchState

_EVERY = 1.0  # seconds between two polls of the center
_TROUBLE = 10.0  # seconds between two polls of the shards
_LEAVING = GRACE + 5.0  # seconds that workers of a launcher that was killed may take to be gone
_SAVING = 300.0  # seconds that reading and saving a center may take at the end
_HURRY = 5.0  # the same, once the user has asked to stop again
_log = logging.getLogger("springline")


class RayKeeper(Keeper):
    """Polls a center on a cluster every second, and fetches it at the end.

    Its shards write checkpoints meanwhile: the center is not sent here in between, over links that
    the workers need.

    Args:
        claim: the run's directory.
        say: prints what was found at the end.
        cluster: where the center is.
        given_up: returns the ranks that are not restarted.
    """

    def __init__(
        self,
        claim: RunDirectory,
        say: Callable[[str], None],
        cluster: ClusterAddress,
        given_up: Callable[[], list[int]],
    ) -> None:
        super().__init__(claim, say)
        self._cluster = cluster
        self._given_up = given_up
        self._head: Any = None
        self._last: CenterStatus | None = None
        self._shards: dict[str, Trouble] = {}  # what each reported last, by name
        self._ask_shards_at = 0.0

    def gone(self, rank: int) -> None:
        """Report to the center that a worker is gone, so that no round waits for it."""
        if self._head is not None:
            with contextlib.suppress(CenterError, RayError):  # heartbeats are missing, too
                self._head.tell("leave", rank, None)

    def is_lost(self) -> bool:
        """Whether there was a center, and it is gone."""
        return self._last is not None and self._open() is None

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> Path | None:
        """Write the final center when all workers are gone; do not wait forever for the cluster."""
        found: Future[Path | None] = Future()

        def finish() -> None:
            try:
                found.set_result(super(RayKeeper, self).finish())
            except RayError as error:
                found.set_exception(CenterError(f"The cluster has not answered: {error}"))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=finish, name="last keeper", daemon=True).start()
        start = time.monotonic()
        while not found.done() and time.monotonic() - start < (_HURRY if hurried() else _SAVING):
            time.sleep(0.1)
        if not found.done():
            raise CenterError("The cluster has not answered yet.")
        return found.result()

    def _keep(self) -> None:
        while not self._stop.wait(_EVERY):
            with contextlib.suppress(CenterError, OSError, RayError):  # the next poll may succeed
                self._look()

    def _open(self) -> RayCenter | None:
        return open_center(self._cluster)

    def _look(self) -> None:
        center = self._open()
        if center is None:
            return
        with center:
            self._head = center.head
            self._head.tell("stay", self._given_up())  # also if no worker is there
            if time.monotonic() > self._ask_shards_at:
                self._ask_shards_at = time.monotonic() + _TROUBLE
                self._hear_of_trouble(center)
            progress = [(rank.steps, rank.exchanges, rank.seconds) for rank in center.progress()]
            self._last = CenterStatus(center.plan, center.version, center.members(), progress)
        self._last.write(self._directory / CENTER)

    def _hear_of_trouble(self, center: RayCenter) -> None:
        """Warn of shards that cannot write a checkpoint, or went back to an older one."""
        for name, pending in [(peer.name, peer.ask("trouble")) for peer in center.shards]:
            try:
                now: Trouble = pending.result(_EVERY)
            except (TimeoutError, PeerLostError):
                continue  # the next poll may succeed
            before = self._shards.get(name, replace(now, failed=None))
            self._shards[name] = now
            if (now.incarnation, now.lost) != (before.incarnation, before.lost):
                text = "%s was restarted: %d exchanges are lost in its part of the center."
                _log.warning(text, name.capitalize(), now.lost)
            if now.failed and not before.failed:  # once, not every time
                _log.warning("No checkpoint of %s: %s", name, now.failed)

    def _retire(self, center: Any) -> None:
        with contextlib.suppress(CenterError, OSError, RayError):  # it can be retired all the same
            self._look()
        center.retire()
        if self._last:
            replace(self._last, members=[]).write(self._directory / CENTER)

    def _left(self) -> Path | None:
        with contextlib.suppress(CenterError):  # there is nothing
            retire(self._cluster.center, self._cluster.token)
        if self._last is None:  # no worker has come in this launch
            return super()._left()
        kept = "and it had no storage."
        if self._cluster.storage:
            kept = f"but in {self._cluster.storage}: `springline export` writes it to a file."
        raise CenterError(f"It is no longer on the cluster, {kept}")


def open_center(cluster: ClusterAddress) -> RayCenter | None:
    """Open a center on the cluster that this process is in; None if there is none.

    Raises:
        EndedError: this process has left the cluster, or is about to.
        TokenError: the center has another token.
    """
    with door.inside():  # a cluster that this process has left might be joined again
        try:
            return RayCenter.open(cluster.center, token=cluster.token)
        except TokenError:
            raise
        except (CenterError, RayError, ConnectionError):
            return None


def center_name(directory: Path) -> str:
    """Return the name of a run's center: the one that it has, wherever its directory is by now.

    A new run gets a random suffix: another machine may have a directory of the same path.
    """
    before = LaunchState.read(directory)
    return (before and before.center) or f"{directory.name}-{uuid.uuid4().hex[:8]}"


def check_center(directory: Path, cluster: ClusterAddress) -> None:
    """Refuse a storage that cannot be used, and a run whose center is gone or in use."""
    name, storage, kept = cluster.center, cluster.storage, False
    try:
        kept = storage is not None and find_center(Storage(storage)) is not None
        center = open_center(cluster)
    except CheckpointError as error:
        raise LaunchError(f"{error} Give another with `--storage`.") from error
    except TokenError as error:
        raise LaunchError(
            f"The center {name} of the run in {directory} is on the cluster, but its token is not "
            f"in {directory / TOKEN}. Copy that file from where the run was started, or wait for "
            "ten minutes without workers: the run then goes on from its storage."
        ) from error
    deadline = time.monotonic() + _LEAVING
    while center and (members := center.members()):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Workers of another launcher are at work with {name}, the center of the run in "
                f"{directory}: ranks {members}. Is there a copy of this directory in which the run "
                "goes on? Wait for its end, or start a new run."
            )
        time.sleep(0.2)
        center = open_center(cluster)
    if CenterStatus.read(directory / CENTER) and not kept and center is None:
        where = f"is not in {storage} any more" if storage else "was started with `--storage none`"
        raise LaunchError(
            f"The center of the run in {directory} {where}: it is gone, and the run cannot go on. "
            "Start a new run."
        )
