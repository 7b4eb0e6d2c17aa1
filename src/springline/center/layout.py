"""Names, shapes and dtypes → offsets in one flat buffer, cut into shards and blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from springline.errors import LayoutError
from springline.rules.fragments import Fragments, fragment_of

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
    fragment: int = 0
    offset: int = 0  # bytes

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

    @property
    def group(self) -> tuple[int, bool, bool]:
        """What stands together in the buffer, in this order: one fragment, kind and dtype."""
        return self.fragment, self.kind == "buffer", self.center_dtype == "float32"


@dataclass(frozen=True)
class ByteRange:
    """Contiguous bytes of one dtype: a shard, or a block of one."""

    start: int
    stop: int
    dtype: str
    kind: Kind
    fragment: int
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

    In the buffer they stand grouped, fragment by fragment, parameters before buffers and float64
    before float32, each aligned to 64 bytes, so that a fragment and a group are contiguous.
    """

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
        fragments: Fragments = 1,
        other_names: Mapping[str, str | None] | None = None,
    ) -> Layout:
        """Lay out a model. `other_names` are for lists of fragments; see `fragment_of`.

        >>> layout = Layout.of({"w": np.zeros((3, 2), "float16"), "b": np.zeros(2)})
        >>> [(e.name, e.center_dtype, e.offset) for e in layout.entries], layout.nbytes
        ([('w', 'float32', 64), ('b', 'float64', 0)], 128)
        """
        entries = [
            *(_entry(name, t, "parameter") for name, t in parameters.items()),
            *(_entry(name, t, "buffer") for name, t in (buffers or {}).items()),
        ]
        if not parameters:
            raise LayoutError("The model has no parameters. Received: an empty mapping.")
        names = [e.name for e in entries]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError(f"Two tensors are named {twice!r}. Names must be unique.")
        sizes = {e.name: e.nbytes for e in entries[: len(parameters)]}
        fragment = fragment_of(sizes, fragments, other_names)
        last = max(fragment.values())  # has the buffers
        return cls._place([replace(e, fragment=fragment.get(e.name, last)) for e in entries])

    @classmethod
    def _place(cls, entries: Sequence[Entry]) -> Layout:
        """Give every tensor its place, group by group."""
        offset, placed = 0, dict[str, Entry]()
        for e in sorted(entries, key=lambda e: e.group):
            placed[e.name] = replace(e, offset=offset)
            offset += aligned(e.nbytes)
        return cls(tuple(placed[e.name] for e in entries), offset)

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

    def shards(
        self, whole: bool, elementwise: bool = False, count: int = SHARDS
    ) -> Iterator[ByteRange]:
        """Cut the buffer into shards, each of one dtype and kind.

        Args:
            whole: cut between blocks only that cross no boundary of a parameter.
            elementwise: a parameter may be cut into several blocks.
            count: about how many, at most.
        """
        target = max(self.nbytes // count, BLOCK)
        in_order = sorted((e for e in self.entries if e.nbytes), key=lambda e: e.group)
        for _, group in groupby(in_order, lambda e: e.group):
            first, *others = group
            last = others[-1] if others else first
            start, stop = first.offset, last.offset + last.nbytes
            if whole and first.kind == "parameter":
                step = BLOCK if elementwise else self.nbytes
                ends = [(e.offset, e.offset + e.nbytes) for e in (first, *others)]
                starts = [at for begin, end in ends for at in range(begin, end, step)]
                cuts = _cuts_between(starts[1:], start, target)
            else:
                pieces = max(round((stop - start) / target), 1)
                size = -(-(stop - start) // pieces // ALIGNMENT) * ALIGNMENT
                cuts = list(range(start + size, stop, size))
            for left, right in zip([start, *cuts], [*cuts, stop], strict=True):
                yield ByteRange(left, right, first.center_dtype, first.kind, first.fragment)

    def blocks(self, shard: ByteRange, whole: bool, elementwise: bool) -> Iterator[ByteRange]:
        """Cut a shard into blocks that stay in cache.

        Args:
            shard: one of `shards`, made with the same arguments, or with a parameter in one only.
            whole: no block crosses the boundary of a parameter, and each knows its own.
            elementwise: a parameter may be cut into several blocks.
        """
        if not (whole and shard.kind == "parameter"):
            for start in range(shard.start, shard.stop, BLOCK):
                yield replace(shard, start=start, stop=min(start + BLOCK, shard.stop))
            return
        for index, e in enumerate(self.entries):
            start, end = max(e.offset, shard.start), min(e.offset + e.nbytes, shard.stop)
            if e.kind == "parameter" and start < end:
                step = BLOCK if elementwise else end - start
                for at in range(start, end, step):
                    yield replace(shard, start=at, stop=min(at + step, end), entry=index)

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
            for what in ("kind", "shape", "center_dtype"):  # fragments are a setting
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

    @cached_property
    def fragments(self) -> int:
        """Into how many fragments the model is cut."""
        return 1 + max(e.fragment for e in self.entries)

    @cached_property
    def fragment_bytes(self) -> tuple[slice, ...]:
        """The part of the flat buffer that each fragment has."""
        ends = [
            max(e.offset + aligned(e.nbytes) for e in self.entries if e.fragment == fragment)
            for fragment in range(self.fragments)
        ]
        return tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))

    def to_json(self) -> list[list[Any]]:
        """Return what `from_json` takes."""
        return [[e.name, list(e.shape), e.dtype, e.kind, e.fragment] for e in self.entries]

    @classmethod
    def from_json(cls, rows: Iterable[tuple[str, Sequence[int], str, Kind, int]]) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        entries = [Entry(name, tuple(n), dtype, kind, f) for name, n, dtype, kind, f in rows]
        names, last = {e.name for e in entries}, max((e.fragment for e in entries), default=0)
        if len(names) < len(entries) or any(e.dtype not in CENTER_DTYPE for e in entries):
            raise ValueError("it has a tensor twice, or of an unknown dtype")
        if {e.fragment for e in entries if e.kind == "parameter"} != set(range(last + 1)):
            raise ValueError("it has a fragment without parameters")
        if any(e.kind == "buffer" and e.fragment != last for e in entries):
            raise ValueError("it has a buffer in the wrong fragment")
        return cls._place(entries)


def aligned(nbytes: int) -> int:
    """Round up to a multiple of 64 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_zeros(nbytes: int) -> Bytes:
    """Return zeros that start at a multiple of 64 bytes."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _entry(name: str, t: Tensor, kind: Kind) -> Entry:
    dtype = str(t.dtype)
    if dtype not in CENTER_DTYPE:
        raise LayoutError(
            f"{kind.capitalize()} {name!r} has dtype {dtype}, but a center holds floating-point "
            f"tensors ({', '.join(CENTER_DTYPE)}). Leave it out."
        )
    return Entry(name, tuple(int(n) for n in t.shape), dtype, kind)


def _cuts_between(boundaries: list[int], start: int, target: int) -> list[int]:
    cuts, last = [], start
    for boundary in boundaries:
        if boundary - last >= target:
            cuts.append(boundary)
            last = boundary
    return cuts
