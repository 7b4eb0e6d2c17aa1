"""`springline run --address` on three hosts, one of which lacks files, or dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clustered import ClusterRun
from launched import TRAINING, Command, wait_for

import hosts
from springline.launch.ray_keeper import center_name

PATIENCE = 180.0
# How soon Ray notices that a node is gone.
SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(hosts.missing()), reason=str(hosts.missing())),
]


@pytest.fixture(scope="module")
def three():
    with hosts.Hosts(3, **SOON) as found:
        yield found


@pytest.fixture
def run(tmp_path):
    return ClusterRun(tmp_path / "run")


@pytest.fixture
def start(three, run, tmp_path):
    """`start(*words)` starts a run of three workers, one on each host, from the first host."""

    def start(*words, at=0):
        options = ("--address", three.address, "--workers", 3, "--cpus", 2, "--run", run.path)
        output = tmp_path / "output"
        with output.open("wb") as file:
            process = three[at].start(
                *(sys.executable, "-m", "springline.cli", "run", *options, *words),
                stdout=file,
                stderr=file,
                env=os.environ | {"COLUMNS": "200"},
            )
        return Command(process, output)

    return start


@pytest.fixture
def hide(three):
    """`hide(number, path)` puts an empty directory over one, on one host only."""
    hidden = []

    def hide(number, path):
        mount = ("mount", "-t", "tmpfs", "none", path)
        assert three[number].start(*mount).wait() == 0
        hidden.append((number, path))

    yield hide
    for number, path in hidden:
        three[number].start("umount", path).wait()


def test_a_machine_without_the_script_is_named(start, hide, three, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    script = project / "main.py"
    script.write_text("import time; time.sleep(1000)")
    hide(2, project)
    command = start("--max-restarts", 1, script)
    assert command.wait(PATIENCE) == 1
    assert f"was lost: FileNotFoundError: {script} is not on " in command.output
    assert f"({three[2].address}), or cannot be read there." in command.output
    assert "`--working-dir DIR`; restart 1 of 1" in command.output


def test_a_machine_that_does_not_see_the_storage_is_named(start, hide, three, run, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    hide(1, storage)
    size = 1_000_000  # a shard for every host
    command = start("--storage", storage, TRAINING, "elastic", 100_000, 0.01, size)
    assert command.wait(PATIENCE) == 1
    place = storage / center_name(run.path)
    assert f"The storage {place} is not the same on all machines: " in command.output


@pytest.mark.parametrize("rule", ["elastic", "average"])
def test_a_machine_that_dies_is_said_and_its_worker_goes_on_elsewhere(start, three, run, rule):
    command = start("--cpus", 1, TRAINING, rule, 300, 0.1)
    wait_for(lambda: run.at_work(6), PATIENCE)
    victim = three[-1]
    there = [w.rank for w in run.state.workers if f"({victim.address})" in w.machine]
    assert there
    reached = run.steps()
    victim.kill()
    wait_for(lambda: all(run.further(rank, reached[rank]) for rank in range(3)), PATIENCE)
    assert command.wait(PATIENCE) == 0, command.output
    for rank in there:
        assert f"Worker {rank} was lost on " in command.output
        assert run.worker(rank).restarts == 1
        assert victim.address not in run.worker(rank).machine
    assert run.steps() == [300] * 3
    assert Path(run.path / "center.safetensors").exists()
    three.add()  # for whoever comes next


RAYLET = """
from pathlib import Path
for path in Path("/proc").glob("[0-9]*/cmdline"):
    if path.read_text().split("\\0")[0].endswith("/raylet/raylet"):
        print(path.parent.name)
"""


def test_a_launcher_whose_own_node_dies_says_so(start, three, run):
    command = start(TRAINING, "elastic", 100_000, 0.05, at=1)
    wait_for(lambda: run.at_work(6), PATIENCE)
    found = three[1].start(sys.executable, "-c", RAYLET, stdout=subprocess.PIPE, text=True)
    three[1].signal(int(found.communicate()[0]), signal.SIGKILL)  # its id on that host
    assert command.wait(PATIENCE) == 1
    assert "This machine has left the cluster (its Ray node has died)" in command.output
    assert command.output.count("the run ends") == 1
    assert "The center could not be saved: This machine has left the cluster." in command.output
    three[1].kill()
    three.add()
