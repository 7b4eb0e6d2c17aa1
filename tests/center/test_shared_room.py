"""Where a shared center's memory is: no room, no tmpfs, and what is left behind."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from springline import ElasticAverage, SharedCenter, Worker
from springline.center import CenterError, CheckpointError, Layout, memory_file
from springline.sealed import read_json, write_json

RULE = ElasticAverage(workers=2, period=1, moving_rate=0.5)
VALUES = {"v": np.arange(4, dtype=np.float32)}


def create(directory, **options):
    return SharedCenter.create_or_join(directory, Layout.of(VALUES), RULE, VALUES, **options)


def left_in(*places):
    """All files below some places, but for the lock file, which may stay."""
    files = [p for where in places for p in Path(where).rglob("*") if p.is_file()]
    return [p.name for p in files if p.name != "lock"]


FULL = """
import os, sys
from pathlib import Path
import numpy as np
from springline import ElasticAverage, SharedCenter
from springline.center import CenterError, Layout, memory_file

directory, pages, lie = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "lie"
memory_file.TMPFS = directory.parent / "shm"
memory_file.TMPFS.mkdir()
if lie:
    os.statvfs = lambda _: os.statvfs_result([4096, 4096, 1 << 30, 1 << 30, 1 << 30] + [0] * 5)
values = {"v": np.zeros(pages * 1024, np.float32)}
try:
    SharedCenter.create_or_join(directory, Layout.of(values), ElasticAverage(), values)
except CenterError as error:
    print(error)
    print([p.name for p in directory.parent.rglob("*") if p.is_file()])
"""


@pytest.mark.parametrize(
    ("pages", "statvfs"), [(1000, "honest"), (1000, "lie"), (254, "honest"), (255, "honest")]
)
def test_a_full_disk_is_told_and_nothing_is_left(tmp_path, pages, statvfs):
    """On a tmpfs of 256 pages; where we may not mount one, with a limit on the size of files.

    A center of 1000 pages has no room; one of 254 or 255 has, but then layout.json has none.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    limit = 'mount -t tmpfs -o size=1m none "$0" 2>/dev/null || ulimit -f 200'
    command = ["sh", "-c", f'{limit}; exec "$@"', disk, sys.executable, "-c", FULL]
    may = subprocess.run("unshare -m true", shell=True, stderr=subprocess.DEVNULL)
    private = [] if may.returncode else ["unshare", "-m"]
    arguments = [disk / "run", str(pages), statvfs]
    done = subprocess.run([*private, *command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message, left = done.stdout.splitlines()
    assert re.search("No room|No space", message)
    assert left == "['lock']"


@dataclass
class Spec:
    shape: tuple
    dtype: str = "float32"


def test_a_model_larger_than_any_disk_is_told(directory, tmpfs):
    layout = Layout.of({"v": Spec((1 << 50,))})
    with pytest.raises(CenterError, match=r"No room for a center of 4503599.6 GB: .*shm has .* GB"):
        SharedCenter.create_or_join(directory, layout, RULE, {})
    assert left_in(directory, tmpfs) == []


def test_a_creation_that_fails_leaves_no_memory(directory, tmpfs, tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        create(directory, restore=damaged)
    assert left_in(directory, tmpfs) == []
    with create(directory) as center:
        np.testing.assert_array_equal(center.values()["v"], VALUES["v"])


@pytest.mark.parametrize("room", ["missing", "full"])
def test_without_a_tmpfs_the_directory_serves(directory, tmp_path, monkeypatch, room):
    if room == "missing":
        monkeypatch.setattr(memory_file, "TMPFS", tmp_path / "nowhere")
    else:
        monkeypatch.setattr(memory_file, "TMPFS", Path("/proc"))  # its statvfs tells of no room
    worker = Worker(VALUES, RULE, directory)
    assert worker.center._path == directory / "center.memory"
    worker.parameters["v"] += 2
    worker.step()
    worker.center.close()
    moved = directory.rename(directory.with_name("moved"))
    with SharedCenter.open(moved) as center:
        np.testing.assert_array_equal(center.values()["v"], VALUES["v"] + 1)
        assert center.version == 1
        center.retire()
    assert "center.memory" not in left_in(moved)


def age(path, seconds):
    """Make a file look older."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_a_sweep_frees_what_nobody_can_reach_and_nothing_else(tmp_path, tmpfs):
    gone, kept, moved, new = (tmp_path / name for name in ("gone", "kept", "moved", "new"))
    for path in (gone, kept, moved):
        create(path).close()
    by_owner = {(home / "run").read_text(): home for home in tmpfs.iterdir()}
    shutil.rmtree(gone)
    values = read_json(moved / "layout.json")  # as after a restart: it has other memory now
    values["memory"] = values["memory"].replace(by_owner[str(moved)].name, "springline-elsewher")
    write_json(moved / "layout.json", values)
    for foreign in ("springline-foreign", "other"):
        (tmpfs / foreign).mkdir()
        (tmpfs / foreign / "file").write_text("mine")
    create(new).close()
    assert by_owner[str(gone)].exists()  # it may have been moved, for all we know
    age(by_owner[str(gone)] / "missing", 25 * 3600)
    create(tmp_path / "newer").retire()
    owners = [h for h in tmpfs.iterdir() if (h / "run").exists()]
    assert {(h / "run").read_text() for h in owners} == {str(kept), str(new)}
    assert (tmpfs / "springline-foreign" / "file").read_text() == "mine"
    assert (tmpfs / "other" / "file").read_text() == "mine"


def test_a_sweep_never_frees_the_memory_of_a_live_worker(tmp_path, tmpfs):
    """Its directory may have been renamed, or be out of sight in another container."""
    worker = Worker(VALUES, RULE, tmp_path / "before")
    worker.parameters["v"] += 2
    worker.step()
    renamed = (tmp_path / "before").rename(tmp_path / "after")
    create(tmp_path / "another").close()
    with SharedCenter.open(renamed) as center:
        np.testing.assert_array_equal(center.values()["v"], VALUES["v"] + 1)
    worker.center.close()
