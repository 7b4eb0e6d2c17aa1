"""Directories of shared centers that are copied and moved: memory belongs to one of them."""

import shutil
import subprocess

import numpy as np
import pytest

from springline import ElasticAverage, SharedCenter, Worker
from springline.center import CenterError, Layout
from springline.sealed import read_json, write_json

RULE = ElasticAverage(period=1, moving_rate=1.0)
VALUES = {"v": np.zeros(4, np.float32)}


def create(directory):
    return SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES)


def train(directory, value):
    """A worker that takes the center to a value, and leaves it in memory."""
    with Worker(VALUES, RULE, directory) as worker:
        worker.parameters["v"][:] = value
        worker.step()
    return worker.center


def value_of(directory):
    with SharedCenter.open(directory) as center:
        return float(center.values()["v"][0])


def copy(directory, to="copy", *options):
    """As a user would."""
    target = directory.with_name(to)
    subprocess.run(["cp", "-r", *options, directory, target], check=True)
    return target


@pytest.mark.parametrize("options", [(), ("-p",), ("-l",)])
def test_a_copy_goes_on_from_its_own_checkpoint_in_its_own_memory(
    directory, memories, caplog, options
):
    center = train(directory, 1)
    center.save()
    center.close()
    train(directory, 2).close()
    other = copy(directory, "copy", *options)
    with pytest.raises(CenterError, match=r"not in memory. Its last checkpoint is .*copy/"):
        SharedCenter.open(other)
    train(other, 7).close()
    assert "is a copy; going on from" in caplog.text
    assert (value_of(directory), value_of(other)) == (2, 7)
    SharedCenter.open(other).retire()
    assert memories(other) == []
    assert value_of(directory) == 2
    train(directory, 3).retire()
    assert memories(directory) == []


def be_a_member(pipe, directory):
    center = train(directory, 1)
    center.save()
    center.join(0, RULE)
    pipe.send("here")
    pipe.recv()


def test_a_copy_of_a_center_that_is_at_work_is_another(directory, start):
    _, pipe = start(be_a_member, directory)
    assert pipe.recv() == "here"
    other = copy(directory)
    train(other, 7).retire()
    assert value_of(directory) == 1
    pipe.send("end")


def test_a_copy_without_a_checkpoint_is_refused(directory):
    train(directory, 1).close()
    other = copy(directory)
    for attempt in (create, SharedCenter.open):
        with pytest.raises(CenterError, match=f"copy of {directory}.*Copy it again when it has"):
            attempt(other)
    assert value_of(directory) == 1


def test_a_copy_whose_original_was_removed_is_still_a_copy(directory):
    center = train(directory, 1)
    center.save()
    center.close()
    train(directory, 2).close()
    other = copy(directory)
    shutil.rmtree(directory)
    with create(other) as center:
        assert center.values()["v"][0] == 1


def test_a_moved_directory_keeps_its_memory_whatever_is_made_meanwhile(directory, memories):
    train(directory, 1).close()
    moved = directory.rename(directory.with_name("moved"))
    create(directory.with_name("another")).close()  # sweeps
    create(directory).close()  # in its old place, too
    assert value_of(moved) == 1
    train(moved, 2).close()
    (home,) = memories(moved)
    assert not (home / "missing").exists()
    again = moved.rename(directory.with_name("again"))
    create(directory.with_name("yet another")).close()
    assert value_of(again) == 2
    train(again, 3).retire()
    assert memories(again) == []


def test_one_directory_under_two_names_is_one_center(directory, memories):
    train(directory, 1).close()
    link = directory.with_name("link")
    link.symlink_to(directory)
    train(link, 2).close()
    assert value_of(directory) == 2
    assert len(memories(directory)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "../../photos/x.jpg",
        "{photos}/x.jpg",
        "/dev/shm/other/center.memory",
        "/dev/shm/springline-12345678/../../x",
        "/dev/shm/springline-12345678/x",
        "springline-12345678/center.memory",
        "",
        7,
        None,
    ],
)
def test_a_layout_names_no_file_but_a_centers_memory(directory, tmp_path, name):
    """As if somebody had written a layout.json that names a file of ours."""
    train(directory, 1).close()
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "x.jpg").write_bytes(bytes(1 << 20))
    values = read_json(directory / "layout.json")
    name = name.format(photos=photos) if isinstance(name, str) else name
    write_json(directory / "layout.json", values | {"memory": name})
    for attempt in (create, SharedCenter.open):
        with pytest.raises(CenterError, match=r"layout.json is .*damaged .* not a center's memory"):
            attempt(directory)
    assert (photos / "x.jpg").read_bytes() == bytes(1 << 20)


@pytest.mark.parametrize("lost", ["lock", "layout.json", "."])
def test_nobody_trains_with_a_second_memory_while_others_have_the_first(directory, start, lost):
    _, pipe = start(be_a_member, directory)
    assert pipe.recv() == "here"
    for name in ["checkpoint.safetensors", lost]:
        shutil.rmtree(directory) if name == "." else (directory / name).unlink()
    with pytest.raises(CenterError, match="has members but its memory is not on this machine"):
        create(directory)
    pipe.send("end")
