"""Files with a checksum: JSON, and safetensors with JSON in its header. Never pickle.

    {"checksum": "0123abcd", ...}                           over all other values
    {"__metadata__": {"checksum", "data", ...}, ...} data   over the header, and over the data

Reading one gives what was written, or one error that names the file, whatever is wrong with it or
stands in its place.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from springline.errors import CenterError, DamagedError
from springline.files import open_regular, write_text
from springline.typed import Count, build, convert

_LARGEST = 1 << 28  # bytes of JSON that are read
_CHECKSUM, _DATA, _METADATA = "checksum", "data", "__metadata__"
_DTYPES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_NUMPY = {ours: np.dtype(name).newbyteorder("<") for name, ours in _DTYPES.items()}
Tensors = Mapping[str, NDArray[Any]]


@contextlib.contextmanager
def reading(
    path: Path | str, advice: str, error: type[CenterError] = DamagedError
) -> Iterator[None]:
    """Turn whatever a damaged file leads to into one error that names it.

    A missing file is not damaged: `FileNotFoundError` passes.

    Args:
        path: the file.
        advice: a sentence, what to do.
        error: the kind of error.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, error):
        raise
    except OSError as why:
        raise error(f"{path} cannot be read ({why.strerror or why}). {advice}") from why
    except Exception as why:  # there is no end of what damage leads to
        words = str(why) if type(why) is ValueError else f"{type(why).__name__}: {why}"
        raise error(f"{path} is cut short or damaged ({words[:200]}). {advice}") from why


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by JSON."""
    write_text(path, json.dumps({_CHECKSUM: _checksum(values), **values}, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` wrote; to be called in `reading`.

    Such a file names others, so that it must be our own.
    """
    with open_regular(path, own=True) as file:
        return _unseal(file.read(_LARGEST + 1))


def write_tensors(
    file: BinaryIO, tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays as safetensors, without a copy of them."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # all are aligned
    data = [_bytes_of(tensors[name]) for name in order]
    header: dict[str, Any] = {}
    start = checksum = 0
    for name, part in zip(order, data, strict=True):
        array, stop = tensors[name], start + part.nbytes
        dtype = _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, stop]}
        start, checksum = stop, zlib.crc32(part.data, checksum)
    ours = {**(metadata or {}), _DATA: f"{checksum:08x}"}
    ours[_CHECKSUM] = _checksum({_METADATA: ours, **header})
    text = json.dumps({_METADATA: ours, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for part in data:
        file.write(part.data)


class TensorFile:
    """What `write_tensors` wrote.

    Attributes:
        metadata: as it was given.

    Raises:
        ValueError: the header is damaged, or does not fit the data.
    """

    def __init__(self, data: bytes | mmap.mmap) -> None:
        header, start = _header(data)
        self.metadata: dict[str, str] = header.pop(_METADATA)
        self._checksum = self.metadata.pop(_DATA)
        self._specs = {name: build(_Spec, row) for name, row in header.items()}
        self._data = memoryview(data)[start:]
        end = 0
        for spec in sorted(self._specs.values(), key=lambda spec: spec.data_offsets):
            first, last = spec.data_offsets
            if first != end or last - first != math.prod(spec.shape) * spec.numpy.itemsize:
                raise ValueError("its tensors do not fit together")
            end = last
        if end != len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes of data, not {end}")

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name: views of the file, read-only.

        Raises:
            ValueError: they are not what was written.
        """
        if f"{zlib.crc32(self._data):08x}" != self._checksum:
            raise ValueError("the checksum of its data does not fit")
        return {
            name: np.frombuffer(self._data[slice(*spec.data_offsets)], spec.numpy).reshape(
                spec.shape
            )
            for name, spec in self._specs.items()
        }


def read_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata of a file of `write_tensors` that begins like this."""
    return dict(_header(data)[0][_METADATA])


def open_tensors(path: Path) -> TensorFile:
    """Map a file of `write_tensors`; to be called in `reading`."""
    with open_regular(path) as file:
        return TensorFile(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@dataclass(frozen=True)
class _Spec:
    """A tensor in the header."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]

    @property
    def numpy(self) -> np.dtype[Any]:
        """Its dtype."""
        if self.dtype not in _NUMPY:
            raise ValueError(f"its dtype {self.dtype[:40]!r} is unknown")
        return _NUMPY[self.dtype]


def _header(data: bytes | mmap.mmap) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header, and where its data begins."""
    start = 8 + int.from_bytes(data[:8], "little")
    if not 8 < start <= min(len(data), _LARGEST):
        raise ValueError("it is too short for its header")
    return _unseal(data[8:start]), start


def _unseal(text: bytes) -> dict[str, Any]:
    """Return the values of a JSON object whose checksum fits, without it."""
    if len(text) > _LARGEST:
        raise ValueError("it is too large")
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - one kind
    place = values.get(_METADATA, values)
    if _METADATA in values:
        values[_METADATA] = place = convert(dict[str, str], place, _METADATA)
    checksum = place.pop(_CHECKSUM, None)
    if checksum is None:
        raise ValueError("it has no checksum")
    if checksum != _checksum(values):
        raise ValueError("its checksum does not fit")
    return values


def _checksum(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
