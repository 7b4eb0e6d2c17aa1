"""Damaged files: refused with their names, by whatever reads them; never other numbers."""

import contextlib
import dataclasses
import io
import json
import logging
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from damage import damage, repair
from rich.console import Console

from remote import Service
from springline import AGN, ElasticAverage, LocalCenter, SharedCenter, Worker
from springline.center import CenterError, Layout, checkpoint
from springline.center.checkpoint import describe, newest
from springline.center.extras import write_extras
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import LaunchError, RunDirectory
from springline.launch.export import export
from springline.launch.request import ClusterRequest
from springline.launch_state import CenterStatus, LaunchState, WorkerEntry
from springline.monitor.curves import Timeline, quantities
from springline.monitor.metrics import read_metrics
from springline.monitor.screen import Screen
from springline.monitor.sources import find_plan
from springline.monitor.status import StatusReader
from springline.rules import Adam
from springline.run import Run

RULE = AGN(period=2, workers=2, outer=Adam(0.1))
VALUES = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3)}
START = 1_700_000_000.0
LOG = logging.getLogger("springline")


def launch(run, **values):
    workers = [WorkerEntry(k, "finished", exit_code=-9, starts=[START, START + 1]) for k in (0, 1)]
    more = {"ended": START + 9, "checkpoint": START + 8, "earlier": [(START - 9, START - 5)]}
    LaunchState("train.py", ["--lr", "1"], START, 1, workers, **more, **values).write(run)


def log(run):
    (run / "metrics").mkdir()
    for rank in (0, 1):
        text = [
            json.dumps({"time": START + k, "step": 10 * k, "loss": 1 / (1 + k), "val_loss": None})
            for k in range(5)
        ]
        (run / "metrics" / f"rank-{rank}.jsonl").write_text("\n".join([*text, ""]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run whose center is in memory, a copy that has its checkpoints only, one on a cluster."""
    root = tmp_path_factory.mktemp("runs")
    live, saved, remote = (root / name for name in ("live", "saved", "remote"))
    live.mkdir()
    launch(live)
    log(live)
    center = SharedCenter.create_or_join(live / "center", Layout.of(VALUES), RULE, VALUES)
    worker = Worker(VALUES, RULE, center)
    for _ in range(2):
        worker.observe({name: np.ones_like(value) for name, value in VALUES.items()})
        worker.exchange()
        center.save()
    worker.finish()
    write_extras(center.directory, {"frozen": np.arange(5)}, {"tied": "w"})
    shutil.copytree(live, saved)
    (remote / "center").mkdir(parents=True)
    rule = ElasticAverage(period=2, workers=2)
    storage = str(root / "storage" / "remote-0123abcd")
    service = Service(Layout.of(VALUES), rule, VALUES, True, None, storage=storage)
    for _ in range(2):
        for peer in service.shards:
            peer.target.save()
    with service.open() as there:
        status = CenterStatus(there.plan, 4, [0], [(20, 2, 0.5), (10, 2, 0.25)])
    service.close()
    status.write(remote / "center")
    asked = {"address": "127.0.0.1:6379", "storage": str(root / "storage")}
    launch(remote, cluster=asked, center="remote-0123abcd")
    yield root
    center.retire()


def opened(run):
    with SharedCenter.open(run / "center") as center:
        return center.version, center.values(), center.progress()


def joined(run):
    place = run / "center"
    with SharedCenter.create_or_join(place, Layout.of(VALUES), RULE, VALUES) as center:
        return center.version, center.values()


def restored(run):
    path = newest(run / "center" / CHECKPOINT_NAME)
    center = LocalCenter(Layout.of(VALUES), RULE, VALUES, restore=path)
    assert center.version >= 0
    return center.version, center.values(), center.memory.state.copy(), describe(path)


def restored_as_given(run):
    """As the user names it: without a look for another."""
    path = run / "center" / CHECKPOINT_NAME
    center = LocalCenter(Layout.of(VALUES), RULE, VALUES, restore=path)
    return center.version, center.values()


def exported(run):
    from safetensors.numpy import load_file

    path = run.with_suffix(".safetensors")
    LOG.info(export(run, path))  # where it comes from
    try:
        return load_file(path)
    finally:
        path.unlink()  # the disk is waited for where a file is replaced


def resumed(run):
    claim = RunDirectory(run)
    try:
        before = LaunchState.read(run)
        asked = ClusterRequest().over(before.cluster if before else None, run)
        now = LaunchState("train.py", [], START + 20, 1, [WorkerEntry(0), WorkerEntry(1)])
        now.go_on(run)
        return claim.configured_workers(), asked, now
    finally:
        claim.release()


def started(run):
    return [Run(run, rank, 2).start_step() for rank in (0, 1)]


def watched(run):
    with contextlib.closing(StatusReader(run)) as reader:
        status = reader.read()
        assert status.version is None or status.version >= 0
        return {k: v for k, v in vars(status).items() if k not in ("checkpoint_age", "bad_lines")}


def drawn(run):
    launch, metrics = LaunchState.read(run), read_metrics(run)
    plan = find_plan(run / "center")
    timeline = Timeline(metrics, plan, launch.launches if launch else ())
    ends = np.array([series.time[-1] for series in metrics.values()])
    seconds = timeline.seconds(ends) if metrics else None
    return quantities(metrics), plan, seconds, timeline.nbytes(ends) if metrics else None


# Of each file: the run that is looked at, and what reads it.
READERS = {
    "live/center/layout.json": ("live", opened, joined, resumed, started, watched, drawn),
    "saved/center/layout.json": ("saved", resumed, started, watched, drawn, exported),
    "saved/center/checkpoint.safetensors": (
        *("saved", restored, restored_as_given, resumed, started, watched),
    ),
    "saved/center/extras.safetensors": ("saved",),
    "live/launch.json": ("live", resumed, watched, drawn),
    "live/metrics/rank-0.jsonl": ("live", watched, drawn),
    "remote/launch.json": ("remote", resumed, watched),
    "remote/center/status.json": ("remote", resumed, watched),
    "storage/remote-0123abcd/head.1.safetensors": ("remote",),
    "storage/remote-0123abcd/shard-0.1.safetensors": ("remote",),
}


class Readers(logging.Handler):
    """What all readers find in files that are whole, and in those of which one is not."""

    def __init__(self):
        super().__init__()
        self.heard = []  # what was logged

    def learn(self, root):
        """Read everything while it is whole, then without each file."""
        self.root = root
        self.whole = {name: (root / name).read_bytes() for name in READERS}
        self.expected = {name: self._read(name) for name in READERS}
        found = [result for results in self.expected.values() for result in results.values()]
        assert not [result for result in found if isinstance(result, Exception)]
        self.instead = {}  # what is found where a file is no use at all
        for name, data in self.whole.items():
            repair(root / name, b"x")
            self.instead[name] = self._read(name)
            repair(root / name, data)

    def check(self, case):
        """Damage one file and read it in every way."""
        rng = random.Random(case)
        name = rng.choice(list(READERS))
        path = self.root / name
        words, fits = damage(path, self.whole[name], rng)
        fits = fits or name.endswith(".jsonl")  # lines have no checksum
        try:
            for reader, found in self._read(name).items():
                where = f"case {case}: {name}, {words}: {reader.__name__}"
                if isinstance(found, Exception):
                    assert isinstance(found, CenterError | LaunchError), (
                        f"{where}: {repr(found)[:300]}"
                    )
                    assert fits or path.name in str(found), f"{where}: {repr(found)[:300]}"
                elif fits:
                    assert all(np.isfinite(n).all() for n in numbers(found)), where
                elif not same(found, self.expected[name][reader]):
                    assert same(found, self.instead[name][reader]), where
                    assert any(path.name in text for text in self.heard), where
        finally:
            repair(path, self.whole[name])

    def emit(self, record):
        """Keep what is logged."""
        self.heard.append(record.getMessage())

    def _read(self, name):
        run, *readers = READERS[name]
        self.heard.clear()
        checkpoint._warned.clear()
        return {reader: self._call(reader, self.root / run) for reader in (*readers, exported)}

    def _call(self, reader, run):
        try:
            return reader(run)
        except Exception as error:
            return error


def same(a, b):
    """Whether two results are equal, to the bit."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b, equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):  # from Python 3.13 on, its == finds no NaN equal to itself
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool(a == b or (a != a and b != b))


def numbers(result):
    """All floating-point arrays in a result."""
    if isinstance(result, dict | tuple):
        parts = result.values() if isinstance(result, dict) else result
        return [n for part in parts for n in numbers(part)]
    return [result] if isinstance(result, np.ndarray) and result.dtype.kind == "f" else []


@pytest.fixture(scope="module")
def readers(runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # no machine is to lose its power here
        readers = Readers()
        level = LOG.level
        LOG.addHandler(readers)
        LOG.setLevel(logging.INFO)
        readers.learn(runs)
        yield readers
        LOG.removeHandler(readers)
        LOG.setLevel(level)


def test_a_damaged_file_is_refused_with_its_name(readers):
    for case in range(2000):
        readers.check(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("thousand", range(2, 50))
def test_none_of_many_is_taken_for_whole(readers, thousand):
    for case in range(1000 * thousand, 1000 * (thousand + 1)):
        readers.check(case)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("center/layout.json", ["run", "--run", "{run}", "{script}"]),
        ("center/layout.json", ["top", "--once", "{run}"]),
        ("center/layout.json", ["plot", "{run}"]),
        ("launch.json", ["run", "--run", "{run}", "{script}"]),
        ("launch.json", ["top", "{run}"]),
        ("launch.json", ["plot", "{run}"]),
        ("launch.json", ["export", "{run}", "{out}"]),
        ("center/extras.safetensors", ["export", "{run}", "{out}"]),
        ("metrics/rank-0.jsonl", ["top", "--once", "{run}"]),
        ("metrics/rank-0.jsonl", ["plot", "{run}"]),
    ],
)
def test_a_command_says_it_in_a_sentence(runs, tmp_path, name, words):
    script, path = tmp_path / "train.py", runs / "saved" / name
    script.write_text("raise SystemExit(77)")
    whole = path.read_bytes()
    path.write_bytes(b"{" + whole[:40])
    if name.endswith("jsonl"):
        path.unlink()
        path.mkdir()
    places = {"run": path.parents[name.count("/")], "script": script, "out": tmp_path / "out"}
    given = [word.format(**places) for word in words]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "springline.cli", *given],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"COLUMNS": "300"},
        )
    finally:
        repair(path, whole)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert str(path) in lines[0]
    assert not (tmp_path / "out").exists()


def test_bad_lines_of_metrics_are_skipped_and_counted(runs, readers):
    name = "live/metrics/rank-0.jsonl"
    whole = readers.whole[name]
    bad = [b"", b"{", b"[]", b'{"time": -1, "step": 3}', b'{"time": 1, "step": 1e400}', b"\xff"]
    bad += [b'{"time": 1, "step": 2, "loss": ' + b"9" * 400 + b"}", b"[" * 100_000]
    repair(runs / name, b"\n".join([*bad, whole]))
    try:
        readers.heard.clear()
        assert same(drawn(runs / "live"), readers.expected[name][drawn])
        assert any("rank-0.jsonl, left out: 8" in text for text in readers.heard)
        assert same(watched(runs / "live"), readers.expected[name][watched])
        console = Console(file=io.StringIO(), width=300)
        with Screen(runs / "live", console, live=False):
            pass
        assert "8 bad lines of metrics skipped" in console.file.getvalue()
    finally:
        repair(runs / name, whole)
