"""Our directories in the tmpfs: whose memory they hold, and which can be freed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from springline.center import memory_file
from springline.center.directory import memory_of
from springline.errors import CenterError

# "center": its directory names it. "lost": nothing does; its maker, or what freed it, was killed.
# "missing": its directory is not where it was; the next to open it elsewhere finds it there.
Fate = Literal["center", "lost", "missing"]
_GRACE = 24 * 3600.0  # seconds that memory outlives a directory which was moved, or removed


@dataclass(frozen=True)
class Segment:
    """One of our directories in the tmpfs."""

    path: Path
    owner: Path | None  # the directory of its center, where it was last seen
    nbytes: int
    mapped: bool  # by a process

    @property
    def memory(self) -> Path:
        """The file of the center's memory, which may be missing."""
        return self.path / memory_file.MEMORY_NAME

    @property
    def fate(self) -> Fate:
        """Whether it is still needed.

        Raises:
            CenterError: its directory is damaged.
        """
        owner = memory_file.owner_of(self.memory)
        if owner is None or not self.memory.exists():
            return "lost"
        if not memory_file.is_owner(owner, self.path):
            return "missing"
        return "center" if memory_of(owner) == self.memory else "lost"

    def free(self, fate: Fate) -> bool:
        """Free the memory if no process maps it and its fate is still this; return whether."""
        names = {path.name for path in self.path.iterdir()}
        if not self.memory.exists():
            # The maker of a segment makes its memory before the other files: those that we have
            # seen without it were left. If there were none, it may be about to be made.
            memory_file.remove(self.path, names & memory_file.NAMES)
        else:
            with memory_file.unmapped(self.memory) as unmapped:
                if unmapped and self.fate == fate:
                    memory_file.remove(self.path, memory_file.NAMES)
        return not self.memory.exists()


def segments() -> Iterator[Segment]:
    """Find those of this user. Takes no lock."""
    for path in sorted(memory_file.TMPFS.glob("springline-*")):
        with contextlib.suppress(OSError):  # they come and go
            status = path.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not ours or not memory_file.HOME.match(path.name):
                continue
            names = {child.name for child in path.iterdir()}
            if names and not names & memory_file.NAMES:
                continue
            memory = path / memory_file.MEMORY_NAME
            nbytes = memory.lstat().st_blocks * 512 if memory.exists() else 0
            yield Segment(path, memory_file.owner_of(memory), nbytes, memory_file.is_mapped(memory))


def in_use(directory: Path) -> bool:
    """Whether a process maps memory of the center that is, or was, in a directory."""
    return any(segment.mapped for segment in segments() if segment.owner == directory)


def sweep() -> None:
    """Free the memory that no process maps and no center needs.

    That of a directory which is not where it was stays for a day.
    """
    for segment in segments():
        with contextlib.suppress(OSError, CenterError):
            if segment.mapped:
                continue
            missing, fate = segment.path / memory_file.MISSING_NAME, segment.fate
            if fate == "center":
                missing.unlink(missing_ok=True)
            elif fate == "missing" and not missing.exists():
                missing.touch(mode=0o600)
            elif fate == "lost" or time.time() - missing.stat().st_mtime > _GRACE:
                segment.free(fate)
