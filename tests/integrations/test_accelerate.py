"""accelerate with springline: alone, on two workers, under torchrun."""

import json
from pathlib import Path

import accelerate
import pytest
import torch
from acc_script import BATCH, EPOCHS, FAR, ROWS, Rows, inner, loader_of, network, train_on
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from processes import LAUNCH, TORCHRUN, python
from safetensors.torch import load_file

import springline
from springline import progress
from springline.center.checkpoint import describe, newest
from springline.integrations.accelerate import Accelerator, shard
from springline.torch import wrap

SCRIPT = Path(__file__).with_name("acc_script.py")
OPTIONS = {"cpu": True, "gradient_accumulation_steps": 4}  # of the 10 batches: 4, 4, 2
STEPS = 3 * EPOCHS  # also of a worker with half of the batches that accumulates 2: 2, 2, 1
SHARE = ROWS // 2


@pytest.fixture(autouse=True)
def _new_process(alone):
    """accelerate's state is the process's."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Script:
    """The script alone, with a schedule; what it has when it ends."""

    def __init__(self, rule=None, save=None, load=None, **options):
        self.accelerator = (Accelerator if rule else accelerate.Accelerator)(**OPTIONS)
        self.data, self.model = Rows(), network()
        self.optimizer = inner(self.model)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        if rule:
            self.optimizer = wrap(rule, self.optimizer, model=self.model, **options)
            loader = shard(loader_of(self.data))
        else:
            loader = self.accelerator.prepare(loader_of(self.data))
        model, optimizer, schedule = self.accelerator.prepare(self.model, self.optimizer, schedule)
        if load:
            self.accelerator.load_state(load)
        left = EPOCHS - 1 if load else EPOCHS
        passes = springline.epochs(loader, left) if rule else ((n, loader) for n in range(left))
        for epoch, batches in passes:
            for batch in batches:
                train_on(self.accelerator, model, optimizer, batch)
                schedule.step()
            if epoch == 0 and save:
                self.accelerator.save_state(save)

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def same(ours, others):
    return all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_alone_it_is_plain_training_to_the_bit(rule):
    plain, ours = Script(), Script(rule, period=2)
    assert ours.data.taken == plain.data.taken
    assert same(ours.weights(), plain.weights())
    # Batches whose gradients are only accumulated are no steps.
    assert ours.optimizer.worker.local_step == STEPS < EPOCHS * ROWS // BATCH


@pytest.mark.parametrize("rule", ["diloco", "average"])
def test_alone_a_state_goes_on_to_the_bit_in_the_middle_of_a_period(tmp_path, rule):
    whole = Script(rule, save=tmp_path / "ours", period=5)
    again = Script(rule, load=tmp_path / "ours", period=5)
    assert again.data.taken == whole.data.taken[ROWS:]
    assert same(again.weights(), whole.weights())
    assert again.optimizer.worker.local_step == STEPS
    Script(save=tmp_path / "plain")
    names = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("plain", "ours")]
    assert names[0] == names[1]


def test_to_prepare_an_optimizer_changes_nothing():
    def train(prepared_at=None):
        model = network().eval()
        opt = stepped = wrap("diloco", inner(model), model=model, period=5)
        for step in range(12):
            if step == prepared_at:
                stepped = Accelerator(cpu=True).prepare(opt)
            model(torch.ones(8)).sum().backward()
            stepped.step()
            stepped.zero_grad()
        return opt, list(model.parameters())

    (opt, ours), (_, others) = train(prepared_at=3), train()
    assert same(ours, others)
    assert (opt.worker.local_step, opt.worker.exchanges) == (12, 2)


def test_only_a_state_with_steps_is_a_checkpoint(directory, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(directory))
    model = network()
    opt = wrap("average", inner(model), model=model)
    optimizer = Accelerator(cpu=True).prepare(opt)  # reloads what it has
    assert not progress._count.loaded
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    opt.load_state_dict(opt.state_dict())
    assert progress._count.loaded
    opt.finish()


def test_a_loader_alone_keeps_its_order():
    data = Rows()
    torch.manual_seed(3)
    loader = loader_of(data)
    ours = shard(loader, "cpu")
    assert [len(batch) for batch in ours] == [BATCH] * (ROWS // BATCH)
    order, data.taken = data.taken, []
    torch.manual_seed(3)
    assert len(list(loader)) == len(ours)
    assert data.taken == order


def test_workers_have_parts_of_one_order(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path))
    taken = {}
    for rank in range(2):
        monkeypatch.setenv("SPRINGLINE_RANK", str(rank))
        torch.manual_seed(rank)
        data = Rows()
        loader = shard(loader_of(data), seed=7)
        for epoch in range(2):
            loader.set_epoch(epoch)
            list(loader)
        taken[rank] = data.taken[: ROWS // 2], data.taken[ROWS // 2 :]
    for epoch in range(2):
        assert sorted(taken[0][epoch] + taken[1][epoch]) == list(range(ROWS))
    assert set(taken[0][0]) != set(taken[0][1])


def test_a_worker_killed_while_it_saves_leaves_the_state_before(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.is_main_process, accelerator.is_local_main_process) == (False, True)
    model = accelerator.prepare(network())
    before = [p.detach().clone() for p in model.parameters()]
    assert not accelerator.has_state(tmp_path)
    own = tmp_path / "worker-1"
    assert accelerator.save_state(tmp_path) == own
    own.rename(tmp_path / "worker-1.old")  # and killed here
    (tmp_path / "worker-1.new").mkdir()
    torch.nn.init.zeros_(model[0].weight)
    assert accelerator.has_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert same(model.parameters(), before)
    accelerator.save_state(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-1"]
    monkeypatch.setenv("SPRINGLINE_RANK", "0")
    with pytest.raises(FileNotFoundError, match="Rank 0 has not saved a state in "):
        accelerator.load_state(tmp_path)


def test_a_run_begins_with_a_state_that_was_saved_alone(tmp_path, monkeypatch):
    before = Script("average", save=tmp_path, period=2)
    saved = load_file(tmp_path / "model.safetensors")
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    (tmp_path / "worker-0").mkdir()  # rank 0 was faster
    accelerator, model = Accelerator(cpu=True), network()
    model, optimizer = accelerator.prepare(model, inner(model))
    accelerator.load_state(tmp_path)
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    assert [int(value["step"]) for value in optimizer.state.values()] == [3] * 4
    assert not same(model.parameters(), before.weights())


def test_names_that_a_restart_would_find_taken_are_refused(monkeypatch):
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    Accelerator(cpu=True, project_config=config)
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    with pytest.raises(ValueError, match="Give `save_state` a directory"):
        Accelerator(cpu=True, project_config=config)


def found_by(out, rank):
    return json.loads((out / f"rank-{rank}.json").read_text())


def test_two_workers_of_which_one_is_killed(tmp_path, directory):
    output = python(tmp_path, *LAUNCH, "--run", directory, SCRIPT, "out", "--kill")
    out = tmp_path / "out"
    first, second = found_by(out, 0), found_by(out, 1)
    assert (first["main"], second["main"]) == (True, False)

    # It was killed after its fifth step, and had exchanged after the fourth: 7 batches.
    assert (first["began"], second["began"]) == (0, 7)
    assert second["moments"] == [5] * 4
    steps = describe(newest(directory / "center" / "checkpoint.safetensors")).steps
    assert steps == [EPOCHS * SHARE // BATCH] * 2
    assert first["made"] == STEPS  # of 15 batches

    # The center's weights replace those of its checkpoint, and the step made with them is dropped.
    assert second["weight"] == FAR
    assert "After its restart, rank 1 goes on with the center's values" in output
    assert second["made"] == STEPS - 4 - 1
    center = load_file(directory / "center.safetensors")
    assert max(value.abs().max() for value in center.values()) < 1
    saved = load_file(out / "final" / "model.safetensors")
    assert all(torch.equal(saved[name], center[name]) for name in saved)

    # Each has its part of the data, and its own state.
    for epoch in (1, 2):
        rows = (
            first["rows"][epoch * SHARE :][:SHARE] + second["rows"][(epoch - 1) * SHARE :][:SHARE]
        )
        assert sorted(rows) == list(range(ROWS))
    assert {path.name for path in (out / "state").iterdir()} == {"worker-0", "worker-1"}


def test_torchrun_without_ddp(tmp_path, memories):
    python(tmp_path, *TORCHRUN, SCRIPT, "out")
    first, second = (found_by(tmp_path / "out", rank) for rank in (0, 1))
    assert first["wrapped"] == second["wrapped"] == "Sequential"
    assert (first["main"], second["main"]) == (True, False)
    assert first["made"] == second["made"] == STEPS
    assert first["version"] == second["version"] == 5  # τ = 2, and what is left over
    assert sorted(first["rows"][:SHARE] + second["rows"][:SHARE]) == list(range(ROWS))
    assert memories(tmp_path) == []


@pytest.mark.slow
def test_torchrun_with_ddp_is_warned_of_and_refused(tmp_path):
    output = python(tmp_path, *TORCHRUN, SCRIPT, "out", "--plain", fails=True)
    assert found_by(tmp_path / "out", 0)["wrapped"] == "DistributedDataParallel"
    assert "The model is in DistributedDataParallel" in output
    assert "RuntimeError: accelerate has joined a group of 2 processes" in output
