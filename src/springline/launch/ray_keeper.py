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
from springline.center.extras import with_extras
from springline.center.ray import RayCenter, retire
from springline.center.ray_peer import door
from springline.center.remote.center import read_stored
from springline.center.remote.head import GRACE
from springline.center.remote.messages import Trouble
from springline.center.remote.peer import PeerLostError
from springline.center.remote.registration import find_center
from springline.center.remote.storage import Storage
from springline.center.token import NAME as TOKEN
from springline.errors import TokenError
from springline.launch.directory import CENTER, LaunchError, RunDirectory
from springline.launch.keeper import Keeper, LostError
from springline.launch_state import CenterStatus, LaunchState

_EVERY = 1.0  # seconds between two polls of the center
_ANSWER = 5.0  # seconds that two polls may take
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
        say: prints where the center is taken from at the end, if it is gone.
        name: the center's.
        storage: where its shards keep checkpoints, if anywhere.
        token: the center's.
        given_up: returns the ranks that are not restarted.
    """

    def __init__(
        self,
        claim: RunDirectory,
        say: Callable[[str], None],
        name: str,
        storage: str | None,
        token: str,
        given_up: Callable[[], list[int]],
    ) -> None:
        super().__init__(claim, say)
        self._given_up = given_up
        self._name = name
        self._storage = storage
        self._token = token
        self._head: Any = None
        self._last: CenterStatus | None = None
        self._lost = False  # whether it was there and is gone
        self._looks = 0
        self._shards: dict[str, Trouble] = {}  # what each reported last, by name
        self._ask_shards_at = 0.0

    def gone(self, rank: int) -> None:
        """Report to the center that a worker is gone, so that no round waits for it."""
        if self._head is not None:
            with contextlib.suppress(
                CenterError, RayError
            ):  # it will find out from missing heartbeats
                self._head.tell("leave", rank, None)

    def is_lost(self) -> bool:
        """Whether there was a center and it is gone; waits for the next poll."""
        deadline, before = time.monotonic() + _ANSWER, self._looks
        while not self._lost and self._looks < before + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._lost

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> Path | None:
        """Write the final center when all workers are gone; do not wait forever for the cluster."""
        found: Future[Path | None] = Future()

        def finish() -> None:
            try:
                found.set_result(super(RayKeeper, self).finish())
            except BaseException as error:
                found.set_exception(_no_answer(error) if isinstance(error, RayError) else error)

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
            self._looks += 1

    def _open(self) -> RayCenter | None:
        return open_center(self._name, self._token)

    def _look(self) -> None:
        center = self._open()
        self._lost = center is None and self._last is not None
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
        """Warn of shards that failed to write a checkpoint, or restarted from an older one."""
        deadline = time.monotonic() + _EVERY
        failed: dict[str, str] = {}
        for name, pending in [(peer.name, peer.ask("trouble")) for peer in center.shards]:
            try:
                trouble: Trouble = pending.result(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, PeerLostError):
                continue  # the next poll may succeed
            before = self._shards.get(name)
            same = before is not None and before.incarnation == trouble.incarnation
            self._shards[name] = trouble
            if before and not same:
                _log.warning("%s was restarted.", name.capitalize())
            if trouble.failed:
                failed[name] = trouble.failed
            if trouble.lost > (before.lost if before and same else 0):
                ago = f", {time.time() - trouble.as_of:.0f} s old" if trouble.as_of else ""
                _log.warning(
                    "%s went back to its last checkpoint%s: %d exchanges are lost in its part of "
                    "the center.",
                    *(name.capitalize(), ago, trouble.lost),
                )
        if failed:
            name, *others = failed
            more = f" and {len(others)} more" if others else ""
            _log.warning("No checkpoint of %s%s: %s", name, more, failed[name])

    def _retire(self, center: Any) -> None:
        with contextlib.suppress(CenterError, OSError, RayError):  # it can be retired all the same
            self._look()
        center.retire()
        if self._last:
            replace(self._last, members=[]).write(self._directory / CENTER)

    def _left(self) -> Path | None:
        with contextlib.suppress(CenterError):  # there is nothing
            retire(self._name, self._token)
        if self._last is None:  # no worker has come in this launch
            return super()._left()
        if self._storage is None:
            raise CenterError("It is not on the cluster any more, and was kept nowhere.")
        stored = read_stored(self._storage)
        self.version = stored.version
        self._say(
            f"The center is not on the cluster any more: it is taken from {self._storage}, version "
            f"{stored.version} of {self._last.version}."
        )
        final = self._write(with_extras(self._directory / CENTER, stored.values))
        if stored.version < self._last.version:
            raise LostError(
                f"The center of version {self._last.version} is lost. What is in {final} is "
                f"{self._last.version - stored.version} exchanges older."
            )
        return final


def open_center(name: str, token: str) -> RayCenter | None:
    """Open a center on the cluster that this process is in; None if there is none.

    Raises:
        EndedError: this process has left the cluster, or is about to.
        TokenError: the center has another token.
    """
    try:
        with door.inside():  # or it might be joined again
            return RayCenter.open(name, token=token)
    except TokenError:
        raise
    except (CenterError, RayError, ConnectionError):
        with door.inside():  # where we have not left it, there is none
            return None


def center_name(directory: Path) -> str:
    """Return the name of a run's center: the one that it has, wherever its directory is by now.

    A new run gets a random suffix: another machine may have a directory of the same path.
    """
    before = LaunchState.read(directory)
    return (before and before.center) or f"{directory.name}-{uuid.uuid4().hex[:8]}"


def check_center(directory: Path, name: str, storage: str | None, token: str) -> None:
    """Refuse a storage that cannot be used, and a run whose center is gone or in use."""
    kept = False
    if storage:
        try:
            kept = find_center(Storage(storage)) is not None
        except CheckpointError as error:
            raise LaunchError(f"{error} Give another with `--storage`.") from error
    made = CenterStatus.read(directory / CENTER) is not None
    try:
        center = open_center(name, token)
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
        center = open_center(name, token)
    if made and not kept and center is None:
        where = f"is not in {storage} any more" if storage else "was started with `--storage none`"
        raise LaunchError(
            f"The center of the run in {directory} {where}: it is gone, and the run cannot go on. "
            "Start a new run."
        )


def _no_answer(error: RayError) -> CenterError:
    lines = str(error).split("\n")
    return CenterError(f"The cluster has not answered ({type(error).__name__}: {lines[0]}).")
