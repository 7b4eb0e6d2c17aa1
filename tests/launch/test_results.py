"""The model that an ordinary script gets from a run is the one that its user believes it is."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from marks import slow
from springline.center.checkpoint import describe

# What the center comes to at least; with what rank 1 reloads it would be 30 and less.
LEAST = {"average": 45, "elastic": 38}
SCRIPT = Path(__file__).with_name("ordinary.py")


@pytest.fixture
def train(start_command, run):
    """`train(*words)` runs a script of `ordinary.py` on two workers, to its end."""

    def train(*words):
        running = start_command("run", "--workers", 2, "--run", run.path, SCRIPT, *words)
        assert running.wait(90) == 0, running.output
        return running.output

    return train


@pytest.fixture
def center(run):
    """The center that the run has left."""
    return lambda: float(load_file(run.path / "center.safetensors")["w"].mean())


@pytest.mark.parametrize("rule", ["average", *slow("elastic")])
def test_a_reloaded_checkpoint_does_not_pull_the_center_back(train, run, center, rule):
    """Rank 1 is killed at step 40 and reloads what it had saved at step 5."""
    said = train("reload", rule)
    assert center() > LEAST[rule]
    assert run.steps() == [60, 60]
    warning = (
        r"After its restart, rank 1 goes on with the center's values \(version \d+\), not with"
    )
    assert len(re.findall(warning, run.log(1))) == 1
    assert re.search(f"Worker 1: {warning}", said)
    assert not re.search(warning, run.log(0))


@pytest.mark.parametrize("who", ["0", *slow("all")])
def test_weights_that_are_loaded_after_wrapping_are_trained(train, run, center, who):
    train("pretrained", who)
    assert 110 < center() <= 120
    assert "the weights that" not in run.log(0) + run.log(1)


def test_every_epoch_has_its_own_steps(train, run):
    """Of three epochs of 5, killed at step 7."""
    train("epochs")
    every = [f"epoch {n} [0, 1, 2, 3, 4]" for n in range(3)]
    assert [line for line in run.log(0).splitlines() if "epoch" in line] == every
    assert [line for line in run.log(1).splitlines() if "epoch" in line] == [
        every[0],
        "epoch 0 []",
        "epoch 1 [2, 3, 4]",
        every[2],
    ]


def test_a_restarted_worker_that_never_asks_is_told_what_to_call(train, run):
    said = train("never_asks")
    warning = "Rank 1 had made 10 steps before it was restarted, and its script begins with the"
    for text in (run.log(1), said):
        assert text.count(warning) == 1
    assert f"Worker 1: {warning}" in said
    assert "springline.start_step()" in said
    assert warning not in run.log(0)


@pytest.mark.slow
def test_gradient_accumulation_goes_on_where_it_was(train, run):
    train("accumulate")
    made = [line for line in run.log(1).splitlines() if line.startswith("made")]
    assert made == [f"made {n}" for n in (*range(11), *range(12, 20))]
    assert run.steps() == [20, 20]


@pytest.mark.parametrize("rule", ["average", *slow("elastic", "agn")])
def test_what_is_reported_is_what_is_saved(train, run, center, rule):
    said = train("uneven", rule)
    found = re.search(r"the center is ([\d.]+) \(center version (\d+)\)", said)
    assert float(found[1]) == pytest.approx(center(), abs=1e-4)
    version = describe(run.path / "center" / "checkpoint.safetensors").version
    assert int(found[2]) == version
    assert f"center.safetensors (version {version})" in said


def test_evaluation_after_the_loop_without_the_end_is_warned_of(train, run):
    said = train("stale", "elastic")
    warning = "What rank 0 has made since its last exchange (steps: 99) is not in the center"
    assert run.log(0).count(warning) == 1
    assert f"Worker 0: {warning}" in said
    assert "opt.final()" in said


@pytest.mark.parametrize("rule", ["elastic", *slow("average")])
def test_alone_evaluation_after_the_loop_is_of_the_trained_model(rule, tmp_path, start_command):
    ran = start_command("stale", rule, driver=(str(SCRIPT),))
    assert ran.wait() == 0
    assert ran.output.strip() == "evaluated 99.0"


@pytest.mark.slow
def test_without_a_launcher_a_rank_that_is_gone_is_not_waited_for(start_command, tmp_path):
    """Rank 0 is killed and never comes back: rank 1 evaluates and reports, ten seconds later."""
    here = {"SPRINGLINE_RUN": str(tmp_path / "run"), "SPRINGLINE_WORKERS": "2"}

    def begin(rank):
        place = here | {"SPRINGLINE_RANK": rank}
        return start_command("reload", "elastic", driver=(str(SCRIPT),), environment=place)

    ranks = [begin("0"), begin("1")]
    ranks[0].process.kill()
    assert ranks[1].wait() == -9  # it dies once
    again = begin("1")
    assert again.wait() == 0, again.output
    assert re.search(r"\d+ \(center version \d+\)", again.output)
    assert np.isfinite(float(again.output.split()[-4]))
