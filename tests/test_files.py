"""Files that are replaced as a whole, whatever happens meanwhile."""

import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.numpy import load_file

from springline import files, sealed

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64"]


SHAPES = arrays.array_shapes(min_dims=0, min_side=0)
NAMES = st.text(max_size=8).filter(lambda name: name != "__metadata__")
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, SHAPES))


@given(st.dictionaries(NAMES, ARRAYS, max_size=5))
def test_tensors_are_what_safetensors_reads(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    files.replace(path, lambda file: sealed.write_tensors(file, tensors, {"key": "ü"}))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    with safe_open(path, framework="np") as file:
        assert file.metadata()["key"] == "ü"
    ours = sealed.open_tensors(path)
    assert ours.metadata == {"key": "ü"}
    for name, array in ours.tensors().items():
        np.testing.assert_array_equal(array, tensors[name])


def test_a_file_is_its_owners_and_nothing_stays_beside_it(tmp_path):
    path, kept = tmp_path / "name", tmp_path / "kept"
    files.write_text(path, "one")
    files.replace(path, lambda file: file.write(b"two"), keep=kept)
    assert (path.read_text(), kept.read_text()) == ("two", "one")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ZeroDivisionError):
        files.replace(path, lambda _: 1 / 0)
    assert {p.name for p in tmp_path.iterdir()} == {"name", "kept"}
    assert path.read_text() == "two"


def hang(pipe, path):
    def write(file):
        file.write(b"half")
        file.flush()
        pipe.send("writing")
        pipe.recv()

    files.replace(path, write)
    pipe.send("written")


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path, start):
    path = tmp_path / "env"
    for other in (".env.local", ".env.1234", ".env.0123456789abcdef.springline.bak", ".envrc"):
        (tmp_path / other).write_text("the user's")
    others = {p.name for p in tmp_path.iterdir()}
    killed, one = start(hang, path)
    writing, two = start(hang, path)
    assert (one.recv(), two.recv()) == ("writing", "writing")
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(30)
    assert len(list(tmp_path.iterdir())) == len(others) + 2
    files.write_text(path, "next")
    assert len(list(tmp_path.iterdir())) == len(others) + 2  # the other still writes
    two.send("go on")
    assert two.recv() == "written"
    writing.join(30)
    assert {p.name for p in tmp_path.iterdir()} == {*others, "env"}
    assert path.read_text() == "half"


def test_a_file_that_is_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Between its creation and its lock nobody can tell that a process writes it."""
    lock, taken = files._lock, []

    def late(fd):
        if not taken:  # another process comes first
            taken.extend(files.leftovers(tmp_path))
            monkeypatch.setattr(files, "_lock", lock)
            files.remove_leftover(taken[0])
        return lock(fd)

    monkeypatch.setattr(files, "_lock", late)
    files.write_text(tmp_path / "x", "whole")
    assert len(taken) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "whole"


def test_a_link_that_stands_in_the_way_is_not_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / f".x.{'0' * 16}.springline").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "x", "other")
    assert precious.read_text() == "keep"
