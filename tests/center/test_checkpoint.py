"""Checkpoints: damage of every sort is refused, and the last good one survives."""

import ast
import logging
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import springline
from springline import AGN, ElasticAverage, LocalCenter, ModelAverage, SharedCenter, Worker
from springline.center import CheckpointError, Layout, checkpoint
from springline.center.plan import BASE, CLOSED
from springline.rules import Adam, Momentum

RULES = [
    ElasticAverage(),
    ModelAverage(),
    AGN(outer=Momentum(0.1)),
    AGN(outer=Adam(0.1)),
]
VALUES = {
    "w": np.ones((9, 5), np.float32),
    "d": np.arange(20.0),
    "scalar": np.array(1, np.float32),
    "empty": np.zeros((0, 2), np.float32),
}


def center(rule, values=VALUES, **options):
    return LocalCenter(Layout.of(values), rule, values, **options)


@pytest.mark.parametrize("rule", RULES, ids=["elastic", "average", "momentum", "adam"])
def test_a_file_cut_anywhere_is_refused(rule, tmp_path):
    path = tmp_path / "center.safetensors"
    center(rule).save(path)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    inside = np.linspace(0, header, 100, endpoint=False), np.linspace(header, len(data), 101)
    places = {int(n) for n in np.concatenate(inside)} - {len(data)}
    assert len(places | {1, header - 1, header + 1, len(data) - 1}) >= 200
    for n in places:
        path.write_bytes(data[:n])
        for attempt in (checkpoint.describe, lambda path: center(rule, restore=path)):
            with pytest.raises(CheckpointError, match=r"cut short or damaged.*center-previous"):
                attempt(path)
    path.write_bytes(data)
    center(rule, restore=path)


def test_a_damaged_header_never_gives_another_error(tmp_path):
    path, rng = tmp_path / "center.safetensors", np.random.default_rng(0)
    center(RULES[3]).save(path)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.integers(header)] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            center(RULES[3], restore=path)
        except CheckpointError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({}, "not a center's checkpoint"),
        ({"springline": "[1]"}, "cut short or damaged"),
        ({"springline": '{"format": 999}'}, r"has format 999, .* reads format 3\. Update"),
        (
            {"springline": '{"format": 1}'},
            r"has format 1, .* reads format 3\. Use the one that wrote",
        ),
    ],
)
def test_another_safetensors_file_is_refused(tmp_path, header, words):
    path = tmp_path / "other.safetensors"
    checkpoint.write_tensors(path, {"center/w": np.ones(3)}, header)
    with pytest.raises(CheckpointError, match=words):
        center(RULES[0], restore=path)
    save_file({"center/w": np.ones(3)}, path, metadata=header)
    words = "it has no checksum" if header else "damaged"
    with pytest.raises(CheckpointError, match=words):
        center(RULES[0], restore=path)


def v(path):
    return float(load_file(path)["center/v"][0])


def save_as(path, value):
    center(RULES[0], {"v": np.full(1, value, np.float32)}).save(path)


def test_the_previous_one_is_kept_and_used(tmp_path, caplog):
    path = tmp_path / "center.safetensors"
    previous = checkpoint.previous(path)
    assert checkpoint.newest(path) is None
    for value in (1, 2, 3):
        save_as(path, value)
    assert (v(path), v(previous)) == (3, 2)
    assert checkpoint.newest(path) == path
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        assert checkpoint.newest(path) == previous
    (record,) = caplog.records  # once
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    path.unlink()
    assert checkpoint.newest(path) == previous
    previous.write_bytes(b"")
    with pytest.raises(CheckpointError, match="center-previous"):
        checkpoint.newest(path)


def test_numbers_that_no_center_has_are_refused(tmp_path):
    """Also where the checksum fits: somebody else has written them."""
    path = tmp_path / "center.safetensors"
    ours = center(RULES[3])
    for where in (ours.memory.center, ours.memory.state):
        before = where[:8].copy()
        where[:8].view(np.float64)[:] = np.nan
        ours.save(path)
        where[:8] = before
        with pytest.raises(CheckpointError, match="has NaN or Inf"):
            center(RULES[3], restore=path)
    ours.memory.head[BASE] = -7
    ours.save(path)
    with pytest.raises(CheckpointError, match="version is -7"):
        center(RULES[3], restore=path)


def test_a_link_is_followed_only_where_a_user_names_it(tmp_path):
    path, link = tmp_path / "center.safetensors", tmp_path / "link.safetensors"
    center(RULES[0]).save(path)
    link.symlink_to(path)
    center(RULES[0], restore=link)
    with pytest.raises(CheckpointError, match=r"link\.safetensors cannot be read"):
        checkpoint.newest(link)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*nothing"):
        center(RULES[0], restore=tmp_path / "nothing")


def save_and_die(pipe, path):
    rename = Path.replace

    def replace(self, target):
        rename(self, target)
        os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = replace
    save_as(path, 2)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_kill_after_the_first_rename_leaves_a_usable_one(tmp_path, start, damaged):
    path = tmp_path / "center.safetensors"
    save_as(path, 1)
    if damaged:  # the last good one is then the one before it
        save_as(path, 1)
        path.write_bytes(path.read_bytes()[:-1])
    process, _ = start(save_and_die, path)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = checkpoint.newest(path)
    assert found
    assert v(found) in (1, 2)
    save_as(path, 3)
    assert v(path) == 3


def save_without_room(pipe, path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        center(RULES[0], {"v": np.full(1000, 2, np.float32)}).save(path)
    except CheckpointError as error:
        pipe.send(str(error))


def test_without_room_the_last_one_is_untouched(tmp_path, start):
    path = tmp_path / "center.safetensors"
    save_as(path, 1)
    _, pipe = start(save_without_room, path)
    assert "Could not write" in pipe.recv()
    assert v(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match=r"Could not write .*none"):
        save_as(tmp_path / "none" / "center.safetensors", 1)


def keep_saving(pipe, directory):
    with SharedCenter.open(directory) as ours:
        pipe.send("ready")
        while not pipe.poll():
            ours.save()
    pipe.send("done")


def test_two_processes_may_save_at_once(directory, start):
    rule = ElasticAverage()
    with SharedCenter.create_or_join(directory, Layout.of(VALUES), rule, VALUES) as ours:
        ours.save()
        _, pipe = start(keep_saving, directory)
        assert pipe.recv() == "ready"
        for _ in range(50):
            ours.save()
            assert checkpoint.newest(directory / "checkpoint.safetensors")
        pipe.send("stop")
        assert pipe.recv() == "done"
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]


def test_nothing_is_ever_unpickled():
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for path in Path(springline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = {alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")}
            names |= {getattr(node, "module", None) or ""}
            assert not {n.split(".")[0] for n in names} & forbidden, path
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in {"np.load", "numpy.load", "torch.load"}, path


def test_a_round_that_is_not_in_every_shard_is_not_counted(directory, tmp_path):
    """Its workers were killed when it was closed, and before they had reduced it."""
    with Worker({"v": np.zeros(4)}, ModelAverage(period=1), directory) as worker:
        worker.step()
        worker.center.memory.head[CLOSED] += 1
        worker.center.save(tmp_path / "saved.safetensors")
        assert checkpoint.describe(tmp_path / "saved.safetensors").version == 1
        worker.center.memory.head[CLOSED] -= 1
    worker.center.close()
