"""The optimizers over a process group, in real processes under `torchrun`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_training import loss_of, network

from springline import ElasticAverage, ModelAverage
from springline.center import checkpoint
from springline.rules import SGD
from springline.rules.reference import Twin

HERE = Path(__file__).parent
SCRIPT = HERE / "torch_collective.py"
RATE, PERIOD = 0.05, 3


def private():
    """Words before a command: its rendezvous listens on a loopback alone, where that is allowed."""
    asked = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    shell = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return [] if asked.returncode else ["unshare", "-n", *shell]


def environment(out):
    return os.environ | {
        "SPRINGLINE_RUN": str(out / "run"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *options]


@contextlib.contextmanager
def running(out, command):
    """A command, in a session of its own that is killed should it not end by itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    whole = [*private(), *command]
    with subprocess.Popen(whole, env=environment(out), start_new_session=True, **pipes) as process:
        try:
            yield process
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def results(out):
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """What both ranks say of every scene of the script."""
    out = tmp_path_factory.mktemp("collective")
    words = torchrun("--standalone", "--nproc-per-node", "2")
    with running(out, [*words, str(SCRIPT), str(out), "scenes"]):
        pass
    return results(out)


def gradient(rank, step, x):
    model = network()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in x.items()})
    loss_of(model, step, rank).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def twin_of(scene):
    """The reference of a scene, before its first step."""
    rule = ModelAverage(period=PERIOD, workers=2)
    if "elastic" in scene:
        rho = 0.3 if "penalty" in scene else 0.0
        rule = ElasticAverage(period=PERIOD, workers=2, rho=rho)
    start = {name: p.detach().numpy() for name, p in network().named_parameters()}
    return Twin(rule, start, SGD(RATE), gradient, together=True)


def compare(twin, scene, pair, atol=1e-6):
    for rank, said in enumerate(pair):
        assert said[scene]["version"] == twin.global_step
        for name, c in twin.c.items():
            np.testing.assert_allclose(said[scene][f"c/{name}"], c, rtol=0, atol=atol)
            x = twin.workers[rank].x[name]
            np.testing.assert_allclose(said[scene][f"x/{name}"], x, rtol=0, atol=atol)


@pytest.mark.parametrize("scene", ["average", "elastic", "elastic with a penalty"])
def test_training_follows_the_twin(scenes, scene):
    twin = twin_of(scene)
    list(twin.run([[0, 1]] * 12))
    compare(twin, scene, scenes)


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_who_finishes_early_holds_up_nobody(scenes, rule):
    """Rank 0 makes 5 steps and rank 1 makes 9: the rest of rank 0 is in round 2, round 3 is alone.

    The twin of that: rank 0 is two steps into its second period when round 2 comes.
    """
    twin = twin_of(rule)
    list(twin.run([[0, 1]] * 5))
    twin.local(1)
    twin.exchange([0, 1])
    list(twin.run([[1]] * 3))
    compare(twin, f"uneven {rule}", scenes)


@pytest.mark.parametrize("scene", ["average", "elastic"])
def test_overlap_meets_in_the_same_rounds(scenes, scene):
    """What is folded in late differs by the steps taken meanwhile, and no more."""
    overlapping, plain = f"{scene}, overlapping", scene
    for said in scenes:
        assert said[overlapping]["version"] == said[plain]["version"] == 4
        for name, c in said[plain].items():
            if name.startswith("c/"):
                np.testing.assert_allclose(said[overlapping][name], c, rtol=0, atol=0.2)


@pytest.mark.parametrize("scene", ["average", "elastic", "average, overlapping", "uneven elastic"])
def test_the_center_is_the_same_to_the_bit(scenes, scene):
    zero, one = ({n: v for n, v in said[scene].items() if n.startswith("c/")} for said in scenes)
    assert zero == one


@pytest.mark.parametrize("scene", ["nan average", "nan elastic"])
def test_nan_on_one_rank_stays_there(scenes, scene):
    zero, one = (said[scene] for said in scenes)
    assert zero["seen"] == ""
    assert "Parameter '0.weight' of rank 1 has NaN or Inf" in one["seen"]
    assert zero["version"] == one["version"] == 2
    assert all(np.isfinite(value).all() for said in (zero, one) for value in said.values()
               if not isinstance(value, str))  # fmt: skip


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("agn", "SettingsError: The rule 'agn' accumulates gradients"),
        ("layout", "LayoutError: The model of rank 1 differs .* 'weight' has shape \\(2, 4\\)"),
        ("settings", "SettingsError: Rank 1 comes with moving_rate=0.3.* with moving_rate=0.2"),
        ("rule", "SettingsError: Rank 1 comes with rule='average', rank 0 with rule='elastic'"),
    ],
)
def test_what_is_refused_is_refused_on_all_ranks(scenes, scene, words):
    for said in scenes:
        assert said[scene] == scenes[0][scene]
        assert re.match(words, said[scene])


def test_buffers_travel_with_the_center(scenes):
    zero, one = (said["batches"] for said in scenes)
    assert zero == one
    assert zero["b"] == zero["c"] != [0.0] * 3


def wait_for(path, process, seconds=90):
    deadline = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"waited in vain for {path}"
        time.sleep(0.05)
    return path.read_text()


def test_a_restarted_group_goes_on_from_the_checkpoint(tmp_path):
    words = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with running(tmp_path, [*words, str(SCRIPT), str(tmp_path), "restart"]) as process:
        _, pid = (int(wait_for(tmp_path / f"waits-{rank}", process)) for rank in (0, 1))
        saved = checkpoint.newest(tmp_path / "run" / "center" / "checkpoint.safetensors")
        steps = checkpoint.describe(saved).steps
        os.kill(pid, signal.SIGKILL)
    zero, one = results(tmp_path)
    assert zero["first"] == one["first"] >= steps[0] == steps[1] > 0  # one may have been under way
    assert zero["first"] % PERIOD == 0
    assert zero["steps"] == one["steps"] == 60
    assert zero["version"] == one["version"] == 20
    left, right = (load_file(tmp_path / f"center-{rank}.safetensors") for rank in (0, 1))
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name])
        np.testing.assert_array_equal(tensor.numpy(), np.float32(zero[f"c/{name}"]))


@pytest.mark.slow
def test_over_several_machines_the_group_of_all_is_the_default(tmp_path):
    """Two agents, as on two machines. The last exchange is at exit, the group destroyed or not."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29417", "--rdzv-id", "a")
    words = torchrun("--nnodes", "2", "--nproc-per-node", "1", *rendezvous)
    agents = '"$@" & first=$!; "$@" && wait $first'
    command = ["sh", "-c", agents, "sh", *words, str(SCRIPT), str(tmp_path), "default"]
    with running(tmp_path, command):
        pass
    assert [said["kind"] for said in results(tmp_path)] == ["CollectiveCenter"] * 2
    saved = checkpoint.describe(tmp_path / "run" / "center" / "checkpoint.safetensors")
    assert (saved.version, saved.steps) == (3, [7, 7])
