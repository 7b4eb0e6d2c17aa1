"""A run with two centers, of which the second cannot be written or read."""

import pytest

SCRIPT = """
import numpy as np, springline, sys
from springline import ElasticAverage, Worker

run, values = springline.directory(), {"w": np.zeros(4, np.float32)}
workers = [
    Worker(values, ElasticAverage(period=1), run / name, 0) for name in ("center", "center-2")
]
for _ in springline.steps(int(sys.argv[1])):
    for worker in workers:
        worker.exchange()
if sys.argv[2] == "block":
    (run / "center-2.safetensors" / "full").mkdir(parents=True)
if sys.argv[2] == "report":
    springline.report("It went well.")
for worker in workers:
    worker.finish()
"""


@pytest.fixture
def train(command, script, run):
    """`train(steps, what)` runs the script on one worker, to its end."""
    path = script(SCRIPT)
    return lambda *words: command("run", "--workers", 1, "--run", run.path, path, *words)


def test_the_own_center_is_there_where_another_cannot_be_written(train, run):
    ended = train(2, "block")
    assert ended.process.returncode == 1
    assert "center-2: Could not write" in ended.output
    assert "The center could not be saved" not in ended.output
    assert f"The center is in {run.path.name}/center.safetensors (version 2)" in ended.output


def test_a_damaged_checkpoint_of_another_center_and_an_old_report(train, run):
    output = train(2, "report").output
    assert "\nIt went well.\n" in output
    assert "\n\n" not in output
    ended = train(4, "")
    assert ended.process.returncode == 0
    assert "It went well" not in ended.output  # this time nothing was reported
    (run.path / "center-2" / "checkpoint.safetensors").write_bytes(b"cut")
    (run.path / "center-2" / "checkpoint-previous.safetensors").unlink(missing_ok=True)
    ended = train(6, "")
    assert ended.process.returncode == 1
    assert "springline: " in ended.output
    assert "is cut short or damaged" in ended.output
    assert "Traceback" not in ended.output
    assert run.steps() == [4]
