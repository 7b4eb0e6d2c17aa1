"""Several optimizers in one script, a GAN for instance: each has a center of its own in the run."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_torch_collective import torchrun
from torch import distributed as dist
from torch import nn
from torch_training import INNERS, RULES, network, train, wrap

from springline.center.checkpoint import describe
from springline.center.segments import segments


def sgd(model):
    return INNERS["sgd"](model.parameters())


@pytest.fixture
def run(directory, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(directory))
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    return directory


@pytest.fixture
def make(run):
    """`make(name=...)` makes an optimizer in the run, for a model of its own."""
    made = []

    def make(model=None, **options):
        model = nn.Linear(2, len(made) + 1) if model is None else model
        made.append(wrap("elastic", sgd(model), 1, model=model, **options))
        return made[-1]

    yield make
    for opt in made:
        opt.worker.finished = True
        opt.worker.member.leave()


def place(opt):
    return opt.worker.center.directory.name


def test_each_has_a_center_by_the_order_of_making(make):
    opts = [make() for _ in range(3)]
    assert [place(opt) for opt in opts] == ["center", "center-2", "center-3"]
    for opt in opts:
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        opt.step()
        assert opt.worker.center.version == 1


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_a_name(rule, run, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "1")
    monkeypatch.setenv("SPRINGLINE_RANK", "0")
    models = [nn.Linear(2, 1) for _ in range(3)]
    opts = [
        wrap(rule, sgd(model), model=model, name=name)
        for model, name in zip(models, (None, "critic", None), strict=True)
    ]
    assert [place(opt) for opt in opts] == ["center", "center-critic", "center-2"]
    for opt in opts:
        opt.finish()
        opt.worker.center.retire()


def test_each_has_a_center_by_its_name(make):
    named = [make(name=name) for name in ("generator", "critic")]
    assert [place(opt) for opt in named] == ["center", "center-critic"]
    assert place(make()) == "center-2"
    with pytest.raises(ValueError, match="Another optimizer of this script is named 'critic'"):
        make(name="critic")


def test_one_that_is_made_again_finds_its_center(make):
    model, other = nn.Linear(2, 1), nn.Linear(2, 3)
    first, second = make(model), make(other, name="critic")
    second.finish()
    assert place(make(other, name="critic")) == "center-critic"
    first.finish()
    assert place(make(model)) == "center"


def test_a_named_one_after_the_first_has_finished(make):
    make().finish()
    assert place(make(name="critic")) == "center-critic"


def test_a_center_that_is_given_does_not_count(make, run):
    assert place(make(center=run / "mine")) == "mine"
    assert place(make()) == "center"


def test_a_parameter_is_in_one_center(make):
    model = network()
    make(model)
    with pytest.raises(ValueError, match=r"'0.weight' is in another wrapped optimizer"):
        make(model)


@pytest.mark.parametrize("name", ["", "2", "a/b", ".hidden", "a b", 3])
def test_a_name_is_part_of_a_files(make, run, name):
    with pytest.raises(ValueError, match=r"`name` must begin with a letter.*Received: name="):
        make(name=name)
    assert not run.exists()


def test_a_name_or_a_center(make, run):
    with pytest.raises(ValueError, match=r"`name` chooses .*leave one of them out"):
        make(name="critic", center=run / "mine")


def test_alone_a_name_changes_nothing():
    model = network()
    opt = wrap("average", sgd(model), model=model, name="critic")
    train(model, opt, range(4))
    assert opt.worker.exchanges == 1


def test_on_a_cluster_a_script_has_one_center(make, monkeypatch):
    """Which center is refused before the cluster is looked for."""
    make(name="first")
    monkeypatch.setenv("SPRINGLINE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SPRINGLINE_CENTER", "digits")
    monkeypatch.setenv("SPRINGLINE_TOKEN", "theirs")
    for name in (None, "first", "second"):
        with pytest.raises(ValueError, match=r"a run on a cluster has one center. Wrap one .*list"):
            make(name=name)


def test_over_a_process_group_each_has_checkpoints_of_its_own(run, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        models = nn.Linear(2, 1), nn.Linear(2, 3)
        opts = [
            wrap("average", sgd(model), 1, model=model, center=dist.group.WORLD, name=name)
            for model, name in zip(models, (None, "critic"), strict=True)
        ]
        for opt in opts:
            opt.final()
        assert describe(run / "center" / "checkpoint.safetensors").version == 0
        assert describe(run / "center-critic" / "checkpoint.safetensors").version == 0
    finally:
        dist.destroy_process_group()


SCRIPT = """
import os, springline, torch
from springline.torch import ElasticAverageOptimizer, ModelAverageOptimizer

torch.manual_seed(0)
models = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)
inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
died = springline.directory() / "died"
generator = ElasticAverageOptimizer(inner[0], model=models[0], period=2)
critic = ModelAverageOptimizer(inner[1], model=models[1], period=3, name="critic")
for step in springline.steps(int(os.environ["STEPS"])):
    models[1](models[0](torch.ones(1, 4))).sum().backward()
    generator.step()
    critic.step()
    if "DIES" in os.environ and springline.rank() == 1 and step == 4 and not died.exists():
        died.touch()
        os.kill(os.getpid(), 9)
if generator.final():
    critic.save_center(springline.directory() / "mine.safetensors")
critic.final()
"""


def springline_run(directory, script, steps, monkeypatch):
    monkeypatch.setenv("STEPS", str(steps))
    command = [sys.executable, "-m", "springline.cli", "run", "--workers", "2", "--no-live"]
    done = subprocess.run(
        [*command, "--run", directory, script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_keeps_all_centers(directory, tmp_path, monkeypatch):
    """A worker is killed: rank 0, which has finished by then, must not keep it waiting."""
    script = tmp_path / "gan.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("DIES", "1")
    printed = springline_run(directory, script, 6, monkeypatch)
    assert f"center-critic is in {directory}/center-critic.safetensors" in printed
    for name in ("center", "center-critic"):
        assert describe(directory / name / "checkpoint.safetensors").steps == [6, 6]
    critic = load_file(directory / "center-critic.safetensors")
    nn.Linear(3, 1).load_state_dict(critic)
    nn.Linear(4, 3).load_state_dict(load_file(directory / "center.safetensors"))
    mine = load_file(directory / "mine.safetensors")
    assert all(torch.equal(mine[name], tensor) for name, tensor in critic.items())
    assert not [s for s in segments() if s.owner and directory in s.owner.parents]  # memory is free
    before = describe(directory / "center-critic" / "checkpoint.safetensors").version
    springline_run(directory, script, 12, monkeypatch)  # both go on where they were
    for name in ("center", "center-critic"):
        assert describe(directory / name / "checkpoint.safetensors").steps == [12, 12]
    assert describe(directory / "center-critic" / "checkpoint.safetensors").version > before
    export = [sys.executable, "-m", "springline.cli", "export", directory / "center-critic"]
    subprocess.run([*export, tmp_path / "c"], check=True)
    again = load_file(directory / "center-critic.safetensors")
    exported = load_file(tmp_path / "c")
    assert all(torch.equal(exported[name], tensor) for name, tensor in again.items())


@pytest.mark.slow
def test_under_torchrun_each_has_its_center(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS", "6")
    script = tmp_path / "gan.py"
    script.write_text(SCRIPT)
    words = torchrun("--standalone", "--nproc-per-node", "2")
    done = subprocess.run([*words, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [directory] = tmp_path.glob("runs/torchrun-*")
    for name in ("center", "center-critic"):
        assert describe(directory / name / "checkpoint.safetensors").steps == [6, 6]
    mine = load_file(directory / "mine.safetensors")
    nn.Linear(3, 1).load_state_dict(mine)
    for center, model in (("center", nn.Linear(4, 3)), ("center-critic", nn.Linear(3, 1))):
        export = [sys.executable, "-m", "springline.cli", "export", directory / center]
        subprocess.run([*export, tmp_path / center], check=True)
        model.load_state_dict(load_file(tmp_path / center))
    critic = load_file(tmp_path / "center-critic")
    assert all(torch.equal(critic[name], tensor) for name, tensor in mine.items())
    assert not [s for s in segments() if s.owner and directory in s.owner.parents]  # memory is free
