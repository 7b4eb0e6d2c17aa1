"""Layouts: every element has one place, in one shard, in one block."""

import json
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springline.center import Layout, LayoutError, layout


@dataclass(frozen=True)
class Spec:
    shape: tuple
    dtype: str = "float32"


dtypes = st.sampled_from(["float16", "bfloat16", "float32", "float64"])
shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
tensors = st.lists(st.builds(Spec, shapes, dtypes), max_size=12)


@st.composite
def layouts(draw):
    parameters = draw(tensors.filter(len))
    buffers = draw(tensors)
    named = [
        {f"{kind}{k}": t for k, t in enumerate(group)}
        for kind, group in zip("pb", (parameters, buffers), strict=True)
    ]
    return Layout.of(*named)


@given(layouts(), st.booleans(), st.booleans(), st.sampled_from([64, 256, 4096]))
def test_shards_and_blocks_tile_the_model_exactly_once(model, whole, elementwise, size):
    with mock.patch.object(layout, "BLOCK", size):
        shards = list(model.shards(whole, elementwise))
        blocks = [list(model.blocks(shard, whole, elementwise)) for shard in shards]
    for ranges in (shards, [block for shard in blocks for block in shard]):
        times = np.zeros(model.nbytes, int)
        for part in ranges:
            times[part.start : part.stop] += 1
            assert part.start % layout.ALIGNMENT == 0
            assert part.start < part.stop <= model.nbytes
        assert times.max(initial=1) == 1
        for e in model.entries:
            assert (times[e.offset : e.offset + e.nbytes] == 1).all()
    assert len(shards) <= layout.SHARDS + 4 or max(s.stop - s.start for s in shards) <= 2 * size
    for shard, inside in zip(shards, blocks, strict=True):
        assert all(shard.start <= b.start and b.stop <= shard.stop for b in inside)
        if elementwise or not whole:
            assert all(b.stop - b.start <= size for b in inside)


@given(layouts(), st.booleans(), st.sampled_from([64, 256]))
def test_whole_shards_and_blocks_cross_no_parameter(model, elementwise, size):
    with mock.patch.object(layout, "BLOCK", size):
        for shard in model.shards(True, elementwise):
            for block in model.blocks(shard, True, elementwise):
                if block.kind == "buffer":
                    assert block.entry is None
                    continue
                e = model.entries[block.entry]
                assert (e.kind, e.center_dtype) == ("parameter", block.dtype)
                assert e.offset <= block.start < block.stop <= e.offset + e.nbytes
                if not elementwise:
                    assert (block.start, block.stop) == (e.offset, e.offset + e.nbytes)


@given(layouts())
def test_entries_are_aligned_apart_and_found_by_name(model):
    assert [e.name for e in model.entries] == list(model.index)
    times = np.zeros(model.nbytes, int)
    for e in model.entries:
        assert e.offset % layout.ALIGNMENT == 0
        times[e.offset : e.offset + e.nbytes] += 1
        if e.nbytes:
            assert model.entry_at(e.offset) == model.entry_at(e.offset + e.nbytes - 1) == e
    assert times.max(initial=0) <= 1
    buffer = model.allocate()
    assert not buffer.size or buffer.ctypes.data % layout.ALIGNMENT == 0
    for name, view in model.views(buffer).items():
        entry = model.entries[model.index[name]]
        assert view.shape == entry.shape
        assert str(view.dtype) == entry.center_dtype


@given(layouts(), layouts())
def test_json_and_back_and_the_difference_of_two(model, other):
    back = Layout.from_json(json.loads(json.dumps(model.to_json())))
    assert back == model
    assert model.difference(back) is None
    same = [(e.name, e.shape, e.center_dtype, e.kind) for e in model.entries] == [
        (e.name, e.shape, e.center_dtype, e.kind) for e in other.entries
    ]
    assert (model.difference(other) is None) == same


def test_write_takes_narrower_values_and_bfloat16_needs_no_numpy_dtype():
    model = Layout.of({"h": Spec((2,), "bfloat16"), "d": Spec((), "float64")})
    buffer = model.allocate()
    model.write(buffer, {"h": np.array([1, 2], np.float16), "d": np.float32(3)})
    views = model.views(buffer)
    assert (views["h"].tolist(), views["d"].tolist()) == ([1, 2], 3)
    assert [e.center_dtype for e in model.entries] == ["float32", "float64"]


@pytest.mark.parametrize(
    ("parameters", "buffers", "words"),
    [
        ({}, {"b": Spec((2,))}, "The model has no parameters"),
        ({"w": Spec((2,))}, {"w": Spec((2,))}, "Two tensors are named 'w'"),
        ({"w": Spec((2,), "complex64")}, {}, "Parameter 'w' has dtype complex64"),
        ({"w": Spec((2,))}, {"mask": Spec((2,), "bool")}, "Buffer 'mask' has dtype bool"),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused(parameters, buffers, words):
    with pytest.raises(LayoutError, match=words):
        Layout.of(parameters, buffers)
