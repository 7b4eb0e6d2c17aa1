"""What the launcher does for a center on a cluster: watches it, keeps it, tells it who is gone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from springline.center import CenterError
from springline.center.checkpoint import describe, newest, previous
from springline.center.ray import RayCenter
from springline.center.ray_peer import door
from springline.center.served.messages import Trouble
from springline.center.served.peer import PeerLostError
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import CENTER, LaunchError
from springline.launch.keeper import Keeper, keep_copy, read_center
from springline.launch.state import CenterStatus

_EVERY = 1.0  # seconds between two looks at the center
_LAST = 5.0  # seconds that the last look may take, and the end if somebody is in a hurry
_TROUBLE = 10.0  # seconds between two questions whether shards are in trouble
_SAVING = 300.0  # seconds that reading and saving a center may take at the end
_BROKEN = 5.0  # seconds that shards have to say that they are
_log = logging.getLogger("springline")


class ClusterKeeper(Keeper):
    """Keeps a center on a cluster: the first checkpoint as soon as there is one.

    Args:
        directory: the run's.
        every: seconds from one checkpoint to the next.
        say: told of a checkpoint that failed.
        name: the center's.
    """

    def __init__(
        self, directory: Path, every: float, say: Callable[[str], None], name: str
    ) -> None:
        super().__init__(directory, every, say)
        self._before = self.saved
        self._name = name
        self._broken = False  # whether it cannot go on

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> Path | None:
        """Do as every keeper does, but not for ever: what is asked may never answer.

        Args:
            hurried: whether somebody does not want to wait any more.
        """
        found: list[Path | BaseException | None] = []

        def finish() -> None:
            try:
                self._end_if_broken()
                found.append(super(ClusterKeeper, self).finish())
            except RayError as error:
                found.append(_no_answer(error))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=finish, name="last keeper", daemon=True)
        thread.start()
        start = time.monotonic()
        while thread.is_alive() and time.monotonic() - start < (_LAST if hurried() else _SAVING):
            thread.join(0.1)
        if not found:
            raise CenterError("The cluster has not answered yet.")
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def _open(self) -> RayCenter | None:
        return None if self._broken else open_center(self._name)

    def _end_if_broken(self) -> None:
        """End a center that cannot go on; what is left of it is its last checkpoint here."""
        self._broken = broken(self._name) is not None
        if self._broken and (center := open_center(self._name)):
            with contextlib.suppress(CenterError, RayError):  # then it ends when nobody has come
                center.retire()

    def _save(self, center: Any) -> None:
        self._checkpoint.parent.mkdir(mode=0o700, exist_ok=True)  # the first one to write there
        try:
            super()._save(center)
        except RayError as error:
            raise _no_answer(error) from error

    def _retire(self, center: Any) -> None:
        center.save(self._checkpoint)
        center.retire()

    def _left(self) -> Path | None:
        saved = newest(self._checkpoint)
        if self.saved == self._before or saved is None:  # no worker has come in this launch
            return super()._left()
        self._say(
            "The center is not on the cluster any more: it is taken from its last checkpoint here, "
            f"of {time.strftime('%H:%M:%S', time.localtime(saved.stat().st_mtime))}."
        )
        return self._write(read_center(self._directory / CENTER, saved))

    def _pause(self) -> float:
        return self._every if self.saved != self._before else min(self._every, _EVERY)


class CenterWatch:
    """Writes down what a center says of itself, again and again, in a thread of its own.

    Args:
        directory: the run's.
        name: the center's.
        shards: into how many it was to be cut, if somebody has said so.
    """

    def __init__(self, directory: Path, name: str, shards: int | None = None) -> None:
        self._directory = directory / CENTER
        self._name = name
        self._shards = shards or 0
        self._last: CenterStatus | None = None
        self._listen_at = 0.0
        self._heard: dict[str, Trouble] = {}  # from the shards, by name
        self._looked = time.monotonic()
        self._head: Any = None
        self._stop = threading.Event()
        self._once_more = False
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._looked = time.monotonic()
        self._thread.start()

    @property
    def silence(self) -> float:
        """Seconds since somebody on the cluster has answered, or said that there is no center."""
        return time.monotonic() - self._looked

    def gone(self, rank: int) -> None:
        """Tell the center that a worker is gone: nobody is to wait for it."""
        if self._head is not None:
            with contextlib.suppress(RayError):  # the center will notice by itself
                self._head.tell("leave", rank, None)

    def end(self) -> None:
        """Look no more; waits for nothing."""
        self._stop.set()

    def finish(self) -> None:
        """Look for the last time, when all workers are gone."""
        self._once_more = True
        self._stop.set()
        self._thread.join(_LAST)
        if self._last is not None:
            replace(self._last, members=[]).write(self._directory)

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY):
            self._try_to_look()
        if self._once_more:
            self._try_to_look()

    def _try_to_look(self) -> None:
        with contextlib.suppress(CenterError, OSError, RayError):  # the next look will do
            self._look()
        self._looked = time.monotonic()

    def _look(self) -> None:
        center = open_center(self._name)
        if center is None:
            return
        with center:
            self._head = center.head
            self._head.tell("stay")  # also if all workers have left it, as long as the run goes on
            self._hear_of_trouble(center)
            if self._last is None and len(center.shards) < self._shards:
                _log.warning(
                    "Shards of the center: %d, as this model cannot be cut into %d.",
                    len(center.shards),
                    self._shards,
                )
            self._last = CenterStatus(
                center.plan.to_json(),
                center.version,
                center.members(),
                [(rank.steps, rank.exchanges, rank.seconds) for rank in center.progress()],
            )
        self._last.write(self._directory)

    def _hear_of_trouble(self, center: RayCenter) -> None:
        """Say, once in a while, which shards could not write their checkpoints, or went back."""
        if time.monotonic() < self._listen_at:
            return
        self._listen_at = time.monotonic() + _TROUBLE
        failed: dict[str, str] = {}
        for name, trouble in _troubles(center, _EVERY):
            before = self._heard.get(name)
            self._heard[name] = trouble
            if trouble.failed:
                failed[name] = trouble.failed
            if before and before.life != trouble.life:
                _log.warning("%s was started again.", name)
            if trouble.lost > (before.lost if before and before.life == trouble.life else 0):
                self._tell_of_loss(name, trouble, center.base + trouble.had)
        if failed:
            name, *others = failed
            more = f" and {len(others)} more" if others else ""
            _log.warning("No checkpoint of %s%s: %s", name, more, failed[name])

    def _tell_of_loss(self, name: str, trouble: Trouble, version: int) -> None:
        """Say what a shard has lost; keep the run directory's copy, if it has more."""
        ago = f"{time.time() - trouble.as_of:.0f} s ago" if trouble.as_of else "some time ago"
        _log.warning(
            "%s has gone back to its checkpoint, of %s: %d exchanges are lost in its part of the "
            "center.",
            name,
            ago,
            trouble.lost,
        )
        path = self._directory / CHECKPOINT_NAME
        for copy in (path, previous(path)):
            try:
                if copy.stat().st_mtime < trouble.began and describe(copy).version > version:
                    kept = keep_copy(self._directory.parent, copy)
                    _log.warning("The run directory's copy has more; it is kept as %s.", kept)
                    break
            except FileNotFoundError:
                continue
            except (LaunchError, CenterError, OSError) as error:
                _log.warning("The run directory's copy could not be kept: %s", error)


def _troubles(center: RayCenter, seconds: float) -> Iterator[tuple[str, Trouble]]:
    """Ask the shards what trouble they have; who does not answer in time is left out."""
    deadline = time.monotonic() + seconds
    asked = [(peer.name, peer.ask("trouble")) for peer in center.shards]
    for name, pending in asked:
        with contextlib.suppress(TimeoutError, PeerLostError):  # the next time will do
            yield name, pending.result(max(0.0, deadline - time.monotonic()))


def broken(name: str) -> str | None:
    """Return why a center on the cluster cannot go on, if it cannot."""
    with contextlib.suppress(CenterError, OSError, RayError):  # it may end this very moment
        if center := open_center(name):
            with center:
                found = (trouble.broken for _, trouble in _troubles(center, _BROKEN))
                return next(filter(None, found), None)
    return None


def _no_answer(error: RayError) -> CenterError:
    lines = str(error).split("\n")
    return CenterError(f"The cluster has not answered ({type(error).__name__}: {lines[0]}).")


def open_center(name: str) -> RayCenter | None:
    """Open a center on the cluster that this process is in; None if there is none.

    Raises:
        EndedError: this process has left the cluster, or is about to.
    """
    try:
        with door.inside():  # or it might be joined anew
            return RayCenter.open(name)
    except (CenterError, RayError, ConnectionError):
        with door.inside():  # where we have not left it, there is none
            return None
