"""Where shards keep their checkpoints: a directory that all machines see, or any fsspec URL.

Every name has two slots that are written in turn, so that the last good one always survives. A slot
is safetensors with the JSON in it and checksums, so that a damaged one is noticed.

A process that restores from a checkpoint begins a new epoch, which fences writers of earlier ones:
one that is still alive, cut off from the others, finds checkpoints of a later epoch and is refused.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center.checkpoint import write_file
from springline.errors import CheckpointError
from springline.files import open_regular
from springline.sealed import TensorFile, read_metadata, reading, write_tensors

_HEADER = "header"
_BEGINNING = 4096  # bytes of a slot, enough for its number and its epoch
Tensors = Mapping[str, NDArray[Any]]
Saved = tuple[dict[str, Any], dict[str, NDArray[Any]]]  # the JSON and the tensors
_log = logging.getLogger("springline")


class FencedError(CheckpointError):
    """A later epoch writes these checkpoints: this process is no longer the one that does."""


class Storage:
    """A place for checkpoints.

    Args:
        place: a directory, or an fsspec URL (`s3://…`, `gs://…`, …) with its package installed.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._written: dict[str, int] = {}  # the number of the last checkpoint of a name
        self._epoch = time.time_ns()
        self._fs: Any = None
        if "://" in place:
            try:
                import fsspec
            except ImportError as error:
                raise CheckpointError(
                    f"A storage of {place} needs fsspec: `pip install springline[ray]`."
                ) from error
            try:
                self._fs, self._root = fsspec.url_to_fs(place)
                self._fs.makedirs(self._root, exist_ok=True)
            except Exception as error:  # each file system has errors of its own
                raise _cannot("use", place, error) from error
        else:
            self._root = str(Path(place).absolute())
            try:
                Path(self._root).mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise _cannot("use", place, error) from error

    def write(self, name: str, header: Mapping[str, Any], tensors: Tensors | None = None) -> None:
        """Write a checkpoint into the slot that does not hold the newest one.

        Raises:
            CheckpointError: it cannot be written; `FencedError` if a later epoch writes them.
        """
        tensors = dict(tensors or {})
        marks = [self._mark(self._slot(name, number)) for number in (0, 1)]
        if name in self._written and max(epoch for _, epoch in marks) > self._epoch:
            raise FencedError(
                f"Another process has restored from the checkpoints of {name} in {self.place}, and "
                "writes them now. This one has stopped."
            )
        if max(number for number, _ in marks) > self._written.get(name, -1):
            self.read(name)  # for the first time; or an earlier epoch has written again
        number = self._written.get(name, 0) + 1
        tensors[_HEADER] = np.frombuffer(json.dumps(dict(header)).encode(), np.uint8)
        mark = {"number": str(number), "epoch": str(self._epoch)}
        path = self._slot(name, number)
        if self._fs is None:
            write_file(Path(path), lambda file: write_tensors(file, tensors, mark))
        else:
            data = io.BytesIO()
            write_tensors(data, tensors, mark)
            try:
                self._fs.pipe_file(path, data.getvalue())
            except Exception as error:  # each file system has errors of its own
                raise _cannot("write", path, error) from error
        self._written[name] = number

    def read(self, name: str) -> Saved | None:
        """Return the newest checkpoint of a name that is whole; None if there is none at all.

        Raises:
            CheckpointError: there is, and it is damaged.
        """
        newest: tuple[int, Saved] | None = None
        damaged: CheckpointError | None = None
        for number in (0, 1):
            try:
                found = self._read_slot(self._slot(name, number))
            except CheckpointError as error:
                damaged = error
                _log.warning("%s", error)
                continue
            if found and (newest is None or found[0] > newest[0]):
                newest = found
        if damaged and not newest:
            raise damaged
        self._written[name] = newest[0] if newest else 0
        return newest[1] if newest else None

    def holds(self, name: str) -> bool:
        """Whether there is a checkpoint of a name, whole or not."""
        slots = [self._slot(name, number) for number in (0, 1)]
        try:
            if self._fs is None:
                return any(Path(slot).exists() for slot in slots)
            self._fs.invalidate_cache()
            return any(self._fs.exists(slot) for slot in slots)
        except Exception as error:  # each file system has errors of its own
            raise _cannot("read", self.place, error) from error

    def _read_slot(self, path: str) -> tuple[int, Saved] | None:
        data = self._bytes(path)
        if data is None:
            return None
        number, epoch = _mark_in(data)
        self._epoch = max(self._epoch, epoch + 1)  # clocks differ between machines
        with reading(path, "Put a copy back, or remove it.", CheckpointError):
            tensors = TensorFile(data).tensors()
            return number, (json.loads(tensors.pop(_HEADER).tobytes()), tensors)

    def _mark(self, path: str) -> tuple[int, int]:
        """Return the number and the epoch of what was last written to a slot, whole or not."""
        try:
            return _mark_in(self._bytes(path, _BEGINNING) or b"")
        except CheckpointError:  # some have no part of a file that is empty
            return _mark_in(self._bytes(path) or b"")

    def _bytes(self, path: str, most: int | None = None) -> bytes | None:
        """Return what a file begins with; None if it is not there."""
        try:
            if self._fs is not None:
                part = {} if most is None else {"start": 0, "end": most}
                return bytes(self._fs.cat_file(path, **part))
            with open_regular(Path(path)) as file:
                return file.read(-1 if most is None else most)
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system has errors of its own
            raise _cannot("read", path, error) from error

    def _slot(self, name: str, number: int) -> str:
        return f"{self._root}/{name}.{number % 2}.safetensors"


def _mark_in(data: bytes) -> tuple[int, int]:
    """Return the number and the epoch that a file was written with; zeros if there are none."""
    try:
        metadata = read_metadata(data)
        return int(metadata["number"]), int(metadata["epoch"])
    except (ValueError, KeyError, RecursionError):
        return 0, 0


def _cannot(what: str, place: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"Cannot {what} {place} for the center's checkpoints: {error}. Give a directory that every "
        "machine of the cluster can write to, or an fsspec URL."
    )
