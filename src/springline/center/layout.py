"""Names, shapes and dtypes → offsets in one flat buffer, cut into shards and blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from springline.errors import LayoutError

ALIGNMENT = 64
SHARDS = 16
# Bytes. Two or three blocks fit in a core's cache: an elastic exchange of 100 MB takes 2.3 memcpys
# in blocks of 64 KiB, 1.9 of 256 KiB, 3.3 of 2 MiB.
BLOCK = 256 * 1024
CENTER_DTYPE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
Kind = Literal["parameter", "buffer"]
Bytes = NDArray[np.uint8]


class Tensor(Protocol):
    """Anything with a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def dtype(self) -> Any:
        """The dtype, or its name."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the model and its place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the model's own
    kind: Kind
    offset: int  # bytes

    @property
    def center_dtype(self) -> str:
        """The dtype of the center: float32, or float64 for float64."""
        return CENTER_DTYPE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the center."""
        return math.prod(self.shape) * np.dtype(self.center_dtype).itemsize

    def view(self, buffer: Bytes) -> NDArray[Any]:
        """Return this tensor's part of a flat buffer, in its own shape."""
        part = buffer[self.offset : self.offset + self.nbytes]
        return part.view(self.center_dtype).reshape(self.shape)


@dataclass(frozen=True)
class ByteRange:
    """Contiguous bytes of one dtype: a shard, or a block of one."""

    start: int
    stop: int
    dtype: str
    kind: Kind
    entry: int | None = None  # the one entry it belongs to, where shards keep entries whole

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start

    def view(self, buffer: Bytes) -> NDArray[Any]:
        """Return these elements of a flat buffer."""
        return buffer[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, in the model's own order.

    In the buffer they stand grouped, parameters before buffers and float64 before float32, each
    aligned to 64 bytes, so that a group is contiguous.
    """

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(
        cls, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> Layout:
        """Lay out a model.

        >>> layout = Layout.of({"w": np.zeros((3, 2), "float16"), "b": np.zeros(2)})
        >>> [(e.name, e.center_dtype, e.offset) for e in layout.entries], layout.nbytes
        ([('w', 'float32', 64), ('b', 'float64', 0)], 128)
        """
        tensors: list[tuple[str, tuple[int, ...], str, Kind]] = [
            *(_describe(name, t, "parameter") for name, t in parameters.items()),
            *(_describe(name, t, "buffer") for name, t in (buffers or {}).items()),
        ]
        if not any(kind == "parameter" for *_, kind in tensors):
            raise LayoutError("The model has no parameters. Received: an empty mapping.")
        names = [name for name, *_ in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError(f"Two tensors are named {twice!r}. Every name must be used once.")
        placed: dict[int, int] = {}
        offset = 0
        for kind, dtype in _GROUPS:
            for index, tensor in enumerate(tensors):
                if (tensor[3], CENTER_DTYPE[tensor[2]]) == (kind, dtype):
                    placed[index] = offset
                    size = math.prod(tensor[1]) * np.dtype(dtype).itemsize
                    offset += aligned(size)
        entries = tuple(Entry(*tensor, offset=placed[i]) for i, tensor in enumerate(tensors))
        return cls(entries, offset)

    @cached_property
    def index(self) -> dict[str, int]:
        """Name → position in `entries`."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    def allocate(self) -> Bytes:
        """Return a new flat buffer of zeros."""
        return aligned_zeros(self.nbytes)

    def views(self, buffer: Bytes) -> dict[str, NDArray[Any]]:
        """Return all tensors of a flat buffer by name."""
        return {entry.name: entry.view(buffer) for entry in self.entries}

    def write(self, buffer: Bytes, values: Mapping[str, Any]) -> None:
        """Copy values, by name, into a flat buffer."""
        for entry in self.entries:
            np.copyto(entry.view(buffer), np.asarray(values[entry.name]), casting="same_kind")

    def shards(self, whole: bool, count: int = SHARDS) -> Iterator[ByteRange]:
        """Cut the buffer into shards, each of one dtype and kind.

        Args:
            whole: cut at the boundaries of parameters only, as outer optimizers need it.
            count: about how many, at most.
        """
        target = max(self.nbytes // count, BLOCK)
        for kind, dtype in _GROUPS:
            group = [
                e for e in self.entries if (e.kind, e.center_dtype) == (kind, dtype) and e.nbytes
            ]
            if not group:
                continue
            start, stop = group[0].offset, group[-1].offset + group[-1].nbytes
            if whole and kind == "parameter":
                cuts = _cuts_between([e.offset for e in group[1:]], start, target)
            else:
                pieces = max(round((stop - start) / target), 1)
                size = -(-(stop - start) // pieces // ALIGNMENT) * ALIGNMENT
                cuts = list(range(start + size, stop, size))
            for left, right in zip([start, *cuts], [*cuts, stop], strict=True):
                yield ByteRange(left, right, dtype, kind)

    def blocks(self, shard: ByteRange, whole: bool, elementwise: bool) -> Iterator[ByteRange]:
        """Cut a shard into blocks that stay in cache.

        Args:
            shard: one of `shards(whole)`.
            whole: no block crosses the boundary of a parameter, and each knows its own.
            elementwise: a parameter may be cut into several blocks.
        """
        if not (whole and shard.kind == "parameter"):
            for start in range(shard.start, shard.stop, BLOCK):
                yield ByteRange(start, min(start + BLOCK, shard.stop), shard.dtype, shard.kind)
            return
        for index, e in enumerate(self.entries):
            if shard.start <= e.offset < shard.stop and e.kind == "parameter" and e.nbytes:
                end = e.offset + e.nbytes
                step = BLOCK if elementwise else e.nbytes
                for at in range(e.offset, end, step):
                    stop = min(at + step, end)
                    yield ByteRange(at, stop, shard.dtype, shard.kind, index)

    def entry_at(self, offset: int) -> Entry:
        """Return the tensor that holds that byte."""
        return next(e for e in self.entries if e.offset <= offset < e.offset + e.nbytes)

    def difference(self, other: Layout) -> str | None:
        """Name the first difference between this layout, the center's, and a worker's."""
        theirs = {e.name: e for e in other.entries}
        for mine in self.entries:
            entry = theirs.pop(mine.name, None)
            if entry is None:
                return f"the center has {mine.kind} {mine.name!r}, the worker does not"
            for what in ("kind", "shape", "center_dtype"):
                ours, its = getattr(mine, what), getattr(entry, what)
                if ours != its:
                    word = what.removeprefix("center_")
                    return f"{mine.name!r} has {word} {ours} in the center, {its} in the worker"
        if theirs:
            entry = next(iter(theirs.values()))
            return f"the worker has {entry.kind} {entry.name!r}, the center does not"
        if [e.name for e in self.entries] != [e.name for e in other.entries]:
            mine, entry = next(
                (a, b) for a, b in zip(self.entries, other.entries, strict=True) if a.name != b.name
            )
            return f"where the center has {mine.name!r}, the worker has {entry.name!r}"
        return None

    def to_json(self) -> list[list[Any]]:
        """Return what `from_json` takes."""
        return [[e.name, list(e.shape), e.dtype, e.kind] for e in self.entries]

    @classmethod
    def from_json(cls, rows: Iterable[tuple[str, Sequence[int], str, Kind]]) -> Layout:
        """Read what `to_json` wrote."""
        tensors: dict[Kind, dict[str, Tensor]] = {"parameter": {}, "buffer": {}}
        for name, shape, dtype, kind in rows:
            tensors[kind][name] = _Spec(tuple(shape), dtype)
        return cls.of(tensors["parameter"], tensors["buffer"])


@dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: str


_GROUPS: tuple[tuple[Kind, str], ...] = (
    ("parameter", "float64"),
    ("parameter", "float32"),
    ("buffer", "float64"),
    ("buffer", "float32"),
)


def aligned(nbytes: int) -> int:
    """Round up to a multiple of 64 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_zeros(nbytes: int) -> Bytes:
    """Return zeros that start at a multiple of 64 bytes."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _describe(name: str, t: Tensor, kind: Kind) -> tuple[str, tuple[int, ...], str, Kind]:
    dtype = str(t.dtype)
    if dtype not in CENTER_DTYPE:
        raise LayoutError(
            f"{kind.capitalize()} {name!r} has dtype {dtype}, but a center holds floating-point "
            f"tensors ({', '.join(CENTER_DTYPE)}). Leave it out."
        )
    return name, tuple(int(n) for n in t.shape), dtype, kind


def _cuts_between(boundaries: list[int], start: int, target: int) -> list[int]:
    cuts, last = [], start
    for boundary in boundaries:
        if boundary - last >= target:
            cuts.append(boundary)
            last = boundary
    return cuts
