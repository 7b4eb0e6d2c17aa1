"""What an ordinary script gets from a run on a cluster: as in `test_results.py`."""

import re
from pathlib import Path

import pytest
from clustered import ClusterRun
from safetensors.numpy import load_file
from test_results import LEAST

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("ordinary.py")


@pytest.fixture
def run(tmp_path):
    return ClusterRun(tmp_path / "run")


@pytest.fixture
def train(start_command, run, cluster):
    """`train(*words)` runs a script of `ordinary.py` on two workers of the cluster, to its end."""

    def train(*words):
        where = ["--address", "auto", "--workers", 2, "--run", run.path]
        running = start_command("run", *where, SCRIPT, *words)
        assert running.wait(150) == 0, running.output
        return running.output

    return train


def center(run):
    return float(load_file(run.path / "center.safetensors")["w"].mean())


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_a_reloaded_checkpoint_does_not_pull_the_center_back(train, run, rule):
    said = train("reload", rule)
    assert center(run) > LEAST[rule]
    assert run.steps() == [60, 60]
    assert re.search(r"Worker 1: After its restart, rank 1 goes on with the center's values", said)


@pytest.mark.parametrize("who", ["all", "0"])
def test_weights_that_are_loaded_after_wrapping_are_trained(train, run, who):
    said = train("pretrained", who)
    assert 110 < center(run) <= 120
    assert "the weights that" not in said


def test_what_is_reported_is_what_is_saved(train, run):
    said = train("uneven", "elastic")
    found = re.search(r"the center is ([\d.]+) \(center version (\d+)\)", said)
    assert float(found[1]) == pytest.approx(center(run), abs=1e-4)
    assert f"center.safetensors (version {found[2]})" in said
