"""Where shards keep their checkpoints: a directory that all machines see, or any fsspec URL.

Every name has two slots that are written in turn, so that the last good one always survives. A slot
is safetensors with the JSON in it and a checksum, so that one cut short is seen. Never pickle.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from springline.center.checkpoint import write_file
from springline.center.errors import CheckpointError

_HEADER = "header"
Tensors = Mapping[str, NDArray[Any]]
Saved = tuple[dict[str, Any], dict[str, NDArray[Any]]]  # the JSON and the tensors


class Storage:
    """A place for checkpoints.

    Args:
        place: a directory, or an fsspec URL (`s3://…`, `gs://…`, …) with its package installed.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._written: dict[str, int] = {}  # the number of the last checkpoint of a name
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
        """Write a checkpoint into the slot that does not hold the newest one."""
        tensors = dict(tensors or {})
        if name not in self._written:
            self.read(name)
        number = self._written.get(name, 0) + 1
        checksum = _checksums(tensors)
        text = json.dumps({"number": number, "checksum": checksum, "header": dict(header)})
        tensors[_HEADER] = np.frombuffer(text.encode(), np.uint8)
        data = save(tensors)
        path = self._slot(name, number)
        if self._fs is None:
            for stale in Path(path).parent.glob(f".{Path(path).name}.*"):  # of who was killed here
                stale.unlink(missing_ok=True)
            write_file(Path(path), lambda temporary: _write_bytes(temporary, data))
        else:
            try:
                self._fs.pipe_file(path, data)
            except Exception as error:  # each file system has errors of its own
                raise _cannot("write", path, error) from error
        self._written[name] = number

    def read(self, name: str) -> Saved | None:
        """Return the newest checkpoint of a name that is whole; None if there is none."""
        newest: tuple[int, Saved] | None = None
        for number in (0, 1):
            found = self._read_slot(self._slot(name, number))
            if found and (newest is None or found[0] > newest[0]):
                newest = found
        if newest is None:
            return None
        self._written[name] = newest[0]
        return newest[1]

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
        try:
            data = Path(path).read_bytes() if self._fs is None else self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system has errors of its own
            raise _cannot("read", path, error) from error
        try:
            tensors = load(data)
            values = json.loads(tensors.pop(_HEADER).tobytes())
            if _checksums(tensors) != values["checksum"]:
                return None
            return values["number"], (values["header"], tensors)
        except (SafetensorError, ValueError, KeyError):
            return None  # cut short: the other slot is whole

    def _slot(self, name: str, number: int) -> str:
        return f"{self._root}/{name}.{number % 2}.safetensors"


def _checksums(tensors: Mapping[str, Any]) -> dict[str, int]:
    return {name: zlib.crc32(tensor.reshape(-1)) for name, tensor in tensors.items()}


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _cannot(what: str, place: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"Cannot {what} {place} for the center's checkpoints: {error}. Give a directory that every "
        "machine of the cluster can write to, or an fsspec URL."
    )
