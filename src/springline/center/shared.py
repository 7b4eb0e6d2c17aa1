"""A center that all processes of one machine share: a directory, no server.

    DIR/layout.json              what the center is and where its memory is; made last
    DIR/lock                     record locks on its bytes: shards, ranks, rounds
    DIR/checkpoint.safetensors   the last checkpoint, and the one before it beside it
    memory                       a mapped file, in a tmpfs if one has room, else in DIR

The mapped file outlives every process. Should it be lost all the same (the machine restarted),
whoever opens the directory next goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from springline.center import checkpoint
from springline.center.errors import CenterError
from springline.center.layout import Bytes, Layout
from springline.center.locks import CREATE, RecordLocks
from springline.center.memory import MemoryCenter, MemoryMember, check_settings
from springline.center.plan import Plan
from springline.rules.rule import Rule

if sys.platform != "win32":
    import fcntl

TMPFS = Path("/dev/shm")  # noqa: S108 - memory directories there get unguessable names and 0700
_FORMAT = 1
LAYOUT_NAME, CHECKPOINT_NAME = "layout.json", "checkpoint.safetensors"
_LOCK, _MEMORY, _OWNER = "lock", "center.memory", "run"
_log = logging.getLogger("springline")


class SharedCenter(MemoryCenter):
    """A center in a directory. Make one with `create_or_join` or `open`."""

    by_path: ClassVar[bool] = True

    def __init__(self, directory: Path, plan: Plan, path: Path, locks: RecordLocks) -> None:
        super().__init__(plan, _map(path, plan.nbytes), locks)
        self.directory = directory
        self._path = path
        self._record_locks = locks
        self._closed = False

    @classmethod
    def create_or_join(
        cls,
        directory: str | Path,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Any],
        *,
        use_locking: bool = True,
        restore: str | Path | None = None,
    ) -> SharedCenter:
        """Open the center in a directory, which is made by whoever comes first.

        Args:
            directory: new, empty or a center's own.
            layout: the worker's model; refused if it is not the center's.
            rule: the worker's; refused if it is not the center's.
            values: the first values, by name. Only the one that makes the center gives them; all
                others take the center's.
            use_locking: whether an exchange is atomic, per shard.
            restore: a checkpoint whose values a new center takes instead.
        """
        directory = _claim(Path(directory))
        plan = Plan.of(layout, rule, use_locking)
        locks = RecordLocks.of(directory / _LOCK)
        try:
            with locks.hold(CREATE):
                found = _read_layout(directory)
                if found is None:
                    with cls._new(directory, plan, locks) as center:
                        center.initialise(values)
                        if restore:
                            center.restore(Path(restore))
                else:
                    existing, path = found
                    if path.exists():
                        center = cls(directory, existing, path, locks)
                    else:
                        center = cls._recover(directory, existing, locks)
                    center.check_layout(layout)
                    check_settings(center.settings, plan.settings)
                    center._say_whose_values(values)
        except BaseException:
            locks.close()
            raise
        return center

    @classmethod
    def open(cls, directory: str | Path) -> SharedCenter:
        """Open a center that is there, whatever its model: to read, to save, to watch."""
        directory = Path(directory)
        _check_platform()
        found = _read_layout(directory)
        if found is None:
            raise CenterError(f"There is no center in {directory}. Start a run there first.")
        plan, path = found
        if not path.exists():
            raise CenterError(
                f"The center in {directory} is not in memory. Its last checkpoint is "
                f"{checkpoint.newest(directory / CHECKPOINT_NAME) or 'missing'}."
            )
        return cls(directory, plan, path, RecordLocks.of(directory / _LOCK))

    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> MemoryMember:
        """Become the worker of that rank."""
        with self.locks.hold(CREATE):
            if not self._path.exists():
                raise CenterError(f"The center in {self.directory} was retired; open it again.")
            return super().join(rank, rule, timeout)

    def save(self, path: Path | None = None) -> None:
        """Write a checkpoint, by default the directory's own."""
        super().save(path or self.directory / CHECKPOINT_NAME)

    def retire(self) -> None:
        """Save a checkpoint and free the memory. Whoever opens the directory next restores it."""
        with self.locks.hold(CREATE):
            if self.members():
                raise CenterError(f"Workers are still members: ranks {self.members()}.")
            self.save()
            _free(self._path, self.directory)
        self.close()

    def close(self) -> None:
        """Leave, and close the lock file of this process."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            super().close()
            self._record_locks.close()

    @classmethod
    @contextlib.contextmanager
    def _new(cls, directory: Path, plan: Plan, locks: RecordLocks) -> Iterator[SharedCenter]:
        """Make a center's memory; what fills it decides whether the center comes to be."""
        path = _new_memory(directory, plan.nbytes)
        try:
            center = cls(directory, plan, path, locks)
            yield center
            center._publish()
        except BaseException:
            _free(path, directory)
            raise

    def _publish(self) -> None:
        """Write the file that makes the center be there: atomically, when all else is."""
        place = self._path.name if self._path.parent == self.directory else str(self._path)
        values = {"format": _FORMAT, "memory": place, "plan": self.plan.to_json()}
        try:
            write_private(self.directory / LAYOUT_NAME, json.dumps(values, indent=1))
        except OSError as error:
            raise CenterError(
                f"Could not write {self.directory / LAYOUT_NAME}: {error.strerror}."
            ) from error

    @classmethod
    def _recover(cls, directory: Path, plan: Plan, locks: RecordLocks) -> SharedCenter:
        saved = checkpoint.newest(directory / CHECKPOINT_NAME)
        if saved is None:
            raise CenterError(
                f"The memory of the center in {directory} is gone (was the machine restarted?) and "
                "there is no checkpoint. Remove the directory, or start in a new one."
            )
        with cls._new(directory, plan, locks) as center:
            if center.members():
                raise CenterError(
                    f"The center in {directory} has members but its memory is not on this machine "
                    f"({socket.gethostname()}). A shared center is for one machine."
                )
            center.restore(saved)
        _log.warning("The center's memory was gone; going on from %s.", saved)
        return center

    def _say_whose_values(self, values: Mapping[str, Any]) -> None:
        ours = self.layout.views(self.memory.center)
        if any(not np.array_equal(ours[n], v) for n, v in values.items() if n in ours):
            _log.info(
                "Joined the center in %s at version %d: its values replace this worker's own.",
                self.directory,
                self.version,
            )


def _check_platform() -> None:
    if sys.platform != "linux":
        raise CenterError(
            f"The shared center needs Linux (record locks, tmpfs); this is {sys.platform}. "
            "A script alone, without `springline run`, works everywhere."
        )


def _claim(directory: Path) -> Path:
    """Return the directory, made or checked to be ours."""
    _check_platform()
    try:
        directory = directory.absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat().st_uid
        names = {p.name for p in directory.iterdir()}
        if owner == os.getuid() and names and not names & {LAYOUT_NAME, _LOCK}:
            raise CenterError(
                f"{directory} is not a center's directory: it holds {sorted(names)[0]!r}. "
                "Give a new or an empty one."
            )
        if owner != os.getuid():
            raise CenterError(f"{directory} belongs to another user (id {owner}).")
        directory.chmod(0o700)
    except OSError as error:
        raise CenterError(
            f"Cannot use {directory} for a center: {error.strerror}. Give a directory that you "
            "may write to."
        ) from error
    return directory


def _read_layout(directory: Path) -> tuple[Plan, Path] | None:
    try:
        values = json.loads((directory / LAYOUT_NAME).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CenterError(f"Cannot read {directory / LAYOUT_NAME}: {error}.") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise CenterError(
            f"{directory / LAYOUT_NAME} is not of a center that this springline can read. "
            "Start in a new directory."
        )
    return Plan.from_json(values["plan"]), directory / values["memory"]


def _map(path: Path, nbytes: int) -> Bytes:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < nbytes:
            raise CenterError(f"{path} is shorter than the center it should hold.")
        fcntl.flock(fd, fcntl.LOCK_SH)  # for as long as it is mapped: nobody sweeps it
        return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    finally:
        os.close(fd)


def _new_memory(directory: Path, nbytes: int) -> Path:
    """Make a file where there is room for it, all of it reserved."""
    _sweep()
    room = {}
    for place in (TMPFS, directory):
        if not place.is_dir():
            continue
        status = os.statvfs(place)
        room[place] = status.f_bavail * status.f_frsize
        if room[place] < nbytes:
            continue
        home = directory
        if place == TMPFS:
            home = Path(tempfile.mkdtemp(prefix="springline-", dir=TMPFS))
        path = home / _MEMORY
        try:
            if place == TMPFS:
                (home / _OWNER).touch(mode=0o600)
                (home / _OWNER).write_text(str(directory), "utf-8")
            _reserve(path, nbytes)
        except OSError as error:
            _free(path, directory)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
        else:
            return path
    free = ", ".join(f"{place} has {size / 1e9:.1f} GB" for place, size in room.items())
    raise CenterError(f"No room for a center of {nbytes / 1e9:.1f} GB: {free}. Free some.")


def _reserve(path: Path, nbytes: int) -> None:
    path.unlink(missing_ok=True)  # left by a creator that was killed
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a full tmpfs would be a SIGBUS later
    finally:
        os.close(fd)


def write_private(path: Path, text: str) -> None:
    """Write a small file atomically, for its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _free(memory: Path, directory: Path) -> None:
    if memory.parent == directory:
        memory.unlink(missing_ok=True)
    else:
        shutil.rmtree(memory.parent, ignore_errors=True)


def _sweep() -> None:
    """Free the memory of our centers that nobody maps and whose directory knows it no more."""
    for home in TMPFS.glob("springline-*"):
        with contextlib.suppress(OSError, CenterError):
            directory = Path((home / _OWNER).read_text("utf-8"))
            if home.stat().st_uid == os.getuid():
                found = _read_layout(directory)
                lost = not directory.exists() or (found and found[1].parent != home)
                if lost and not _is_mapped(home / _MEMORY):
                    shutil.rmtree(home, ignore_errors=True)


def _is_mapped(memory: Path) -> bool:
    if not memory.exists():
        return False
    fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
