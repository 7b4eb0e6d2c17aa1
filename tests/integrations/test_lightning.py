"""The callback in the real Lightning: alone to the bit, in real runs, killed, saved, refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from springline.integrations.lightning import Springline
from springline.integrations.lightning_strategy import Part
from springline.torch import ModelAverageOptimizer

SCRIPT = Path(__file__).with_name("lightning_script.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_digits.py"
RUN = [sys.executable, "-m", "springline.cli", "run", "--no-live", "--workers", "2", "--run", "run"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*num_workers"),
]


class Classifier(LightningModule):
    """Digits; notes the weights that are validated."""

    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
        )
        self.optimizer, self.validated = optimizer, []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.validated.append(weights(self))

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def weights(model):
    return {name: v.detach().clone() for name, v in model.state_dict().items()}


def same(left, right):
    assert left.keys() == right.keys()
    for name, v in left.items():
        assert torch.equal(v, right[name]), name


def data(shuffle=True):
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images[:320]).float() / 16
    return DataLoader(TensorDataset(images, torch.from_numpy(labels[:320])), 32, shuffle=shuffle)


def trainer(*callbacks, **options):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet, **options)


def fit(*callbacks, model=None, ckpt_path=None, shuffle=True, **options):
    model, made = model or Classifier(), trainer(*callbacks, **options)
    torch.manual_seed(2)
    made.fit(model, data(shuffle), data(False), ckpt_path=ckpt_path)
    return model, made


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_alone_it_is_the_trainer_to_the_bit(rule):
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "val_check_interval": 6}
    plain, by_itself = fit(**options)
    model, trained = fit(Springline(rule, period=3), **options)
    same(weights(model), weights(plain))
    assert trained.global_step == by_itself.global_step == 8
    assert trained.callback_metrics == by_itself.callback_metrics


def test_an_optimizer_that_is_wrapped_already_just_works():
    def wrapped(parameters, lr):
        return ModelAverageOptimizer(torch.optim.AdamW(parameters, lr=lr), period=3)

    same(weights(fit(Springline(), model=Classifier(wrapped))[0]), weights(fit()[0]))


def test_skipped_steps_of_accumulation_are_no_local_steps():
    _, trained = fit(Springline("diloco", period=2), accumulate_grad_batches=4)
    assert trained.optimizers[0].worker.local_step == trained.global_step == 6


def test_what_is_validated_saved_and_left_is_the_center(tmp_path):
    """Under DiLoCo the center is not what the worker has."""
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            center = trainer.optimizers[0].worker.center.values()
            seen.append({name: torch.from_numpy(v) for name, v in center.items()})
            own = weights(pl_module)
            if trainer.global_step == 10:
                assert not torch.equal(own["net.0.weight"], seen[-1]["net.0.weight"])

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 10:  # after the validation it is the worker's own again
                assert not torch.equal(pl_module.net[0].weight, seen[-1]["net.0.weight"])

    saves = ModelCheckpoint(tmp_path, save_last=True, save_top_k=-1)
    model, trained = fit(Springline("diloco", period=7), Looks(), saves, enable_checkpointing=True)
    tensors = seen[-1].keys()
    for shown, center in zip(model.validated[1:], (seen[9], seen[-1]), strict=True):
        same({name: shown[name] for name in tensors}, center)
    for path, shown in zip(sorted(tmp_path.glob("epoch*")), model.validated[1:], strict=True):
        same(torch.load(path)["state_dict"], shown)
    same(weights(model), model.validated[-1])
    trained.validate(model, data(False), verbose=False)
    same(model.validated[-1], weights(model))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_alone_a_checkpoint_goes_on_to_the_bit(tmp_path):
    """With the worker's own weights, though it holds the center's."""
    saves = {"every_n_train_steps": 10, "save_top_k": -1}
    rule, options = (
        {"rule": "diloco", "period": 7},
        {"shuffle": False, "enable_checkpointing": True},
    )
    whole, _ = fit(Springline(**rule), ModelCheckpoint(tmp_path, **saves), **options)
    saved = next(tmp_path.glob("*step=10.ckpt"))
    assert not torch.equal(  # what it holds for others is the center
        torch.load(saved)["state_dict"]["net.0.weight"],
        torch.load(saved)["optimizer_states"][0]["springline"]["own"]["net.0.weight"],
    )
    again = Springline(**rule), ModelCheckpoint(tmp_path / "again", **saves)
    same(weights(fit(*again, ckpt_path=saved, **options)[0]), weights(whole))


def test_a_checkpoint_of_the_last_step_is_warned_of(tmp_path, caplog):
    _, first = fit(Springline("average"))
    first.save_checkpoint(tmp_path / "last.ckpt")
    assert "Nothing was trained" not in caplog.text
    fit(Springline("average"), ckpt_path=tmp_path / "last.ckpt")
    assert "Nothing was trained" in caplog.text


def test_a_learning_rate_monitor_sees_the_schedule(tmp_path):
    monitor = LearningRateMonitor("step")
    fit(Springline("average"), monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert len(set(monitor.lrs["lr-AdamW"])) == 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Springline("easgd"),
            "`rule` must be one of \"elastic\", .* Received: rule='easgd'",
        ),
        (lambda: Springline(period=3), "Options need a rule.* Received: period"),
        (lambda: fit(Springline()), "Name a rule.* Received: AdamW"),
        (
            lambda: fit(Springline("average"), strategy="ddp", devices=1),
            "one device.*Received: DDPStrategy",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_manual_optimization_is_refused():
    model = Classifier()
    model.automatic_optimization = False  # as with several optimizers
    with pytest.raises(ValueError, match=r"automatic optimization.* Received: .* of Classifier"):
        fit(Springline("average"), model=model)


def test_the_older_name_of_the_package_serves_as_well():
    text = """
import sys, torch
sys.modules["lightning"] = None
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from springline.integrations.lightning import Springline
options = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
trainer = pl.Trainer(accelerator="cpu", max_steps=5, callbacks=[Springline("average")], **options)
trainer.fit(BoringModel())
print("version", trainer.optimizers[0].worker.center.version)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=200)
    assert "version 1" in done.stdout, done.stderr


def test_a_part_begins_in_the_middle_of_an_epoch_once():
    loader = DataLoader(range(20), 3, shuffle=True)
    parts = [Part.of(loader, 2, rank) for rank in range(2)]
    whole = [list(part) for part in parts]
    assert sorted(whole[0] + whole[1]) == list(range(20))
    parts[1].skip = 2
    assert [list(parts[1]), list(parts[1])] == [whole[1][6:], whole[1]]
    given = DataLoader(range(20), 3, sampler=DistributedSampler(range(20), 4, 3, seed=7))
    assert list(Part.of(given, 2, 0)) == list(given.sampler)
    assert Part.of(DataLoader(range(20), batch_sampler=[[1], [2]]), 2, 0) is None


def launched(tmp_path, *words, command=RUN, status=0):
    """Run a script to its end, in real processes; return what was printed."""
    done = subprocess.run(
        [*command, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def made(tmp_path, rank):
    """What a rank has made, in order: step, epoch, data, what its schedule said."""
    text = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
    found = re.findall(r"^made (\d+) (\d+) (\[.*\]) (\d+)$", text, re.MULTILINE)
    return [
        (int(step), int(epoch), json.loads(seen), int(left)) for step, epoch, seen, left in found
    ]


def metrics(tmp_path, rank):
    lines = (tmp_path / "run" / "metrics" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_worker_that_is_killed_makes_the_steps_that_are_left(tmp_path):
    """In the middle of an epoch, with rank 0's checkpoint: the same data, the same schedule."""
    output = launched(tmp_path, SCRIPT, "dies", 9)
    assert "30 of 30 steps" in output
    assert (
        len(re.findall(r"goes on at step 8 with the optimizer's state of .*last.ckpt", output)) == 1
    )
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert log.count("--- rank 1, start") == 2
    [center] = set(load_file(tmp_path / "run" / "center.safetensors")["w"].tolist())
    assert f"after fit {center} steps 15" in log  # on every rank the center of them all
    assert f"tested {center} SingleDeviceStrategy" in log
    before, after = made(tmp_path, 1)[:9], made(tmp_path, 1)[9:]
    assert [step for step, *_ in before] == list(range(9))
    assert [step for step, *_ in after] == list(range(8, 15))  # the ninth was not exchanged
    assert before[8] == after[0]
    assert [left for *_, left in after] == [100 - step for step, *_ in after]
    for epoch in range(3):
        of = [{n: d for n, e, d, _ in made(tmp_path, rank) if e == epoch} for rank in range(2)]
        assert sorted(n for part in of for d in part.values() for n in d) == list(range(40))
    # One writer, and the center in what it wrote.
    assert len(list(tmp_path.glob("csv/lightning_logs/*/metrics.csv"))) == 1
    assert sorted(p.name for p in tmp_path.glob("checkpoints/*")) == [
        *("epoch=2-step=15.ckpt", "last.ckpt")
    ]
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt")
    assert torch.equal(saved["state_dict"]["w"], torch.full((4,), center))
    # What the screen and the plot show.
    for rank in range(2):
        lines = metrics(tmp_path, rank)
        assert {line["step"] for line in lines if "loss" in line} == set(range(1, 16))
        assert [line["val_weight"] for line in lines if "val_weight" in line][-1] == center


@pytest.mark.slow
def test_accumulation_in_a_worker_that_is_killed(tmp_path):
    launched(tmp_path, SCRIPT, "accumulates", 5)
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert re.search(r"after fit [\d.]+ steps 9$", log, re.MULTILINE)  # 5 batches are 3 steps
    steps = [step for step, *_ in made(tmp_path, 1)]
    assert steps == [0, 0, 1, 1, 2, 3, 3, 4, 4, *(4, 4, 5, 6, 6, 7, 7, 8)]


@pytest.mark.slow
def test_all_workers_stop_when_one_asks(tmp_path):
    output = launched(tmp_path, SCRIPT, "stops")
    for rank in range(2):
        assert 3 <= len(made(tmp_path, rank)) < 200
    assert "weight" in output


def test_the_best_checkpoint_is_rank_0s_for_all(tmp_path):
    """Each rank takes another epoch for the best, and only rank 0 writes files."""
    output = launched(tmp_path, SCRIPT, "best")
    assert "restart" not in output, output
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert all("tested 4.0 " in log for log in logs), logs  # the center after step 4


def test_under_torchrun_the_workers_meet(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    output = launched(tmp_path, SCRIPT, "plain", command=torchrun)
    assert output.count("after fit 15.0 steps 15") == 2
    assert output.count("tested 15.0 SingleDeviceStrategy") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("many", "one device.*Received: DDPStrategy"),
        ("ddp", "does not match the world size"),  # Lightning's own, before any callback
    ],
)
def test_under_torchrun_it_never_becomes_ddp(tmp_path, kind, message):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    output = launched(tmp_path, SCRIPT, kind, command=torchrun, status=1)
    assert re.search(message, output)
    assert "made 0" not in output


def test_the_example_runs(tmp_path):
    output = launched(tmp_path, EXAMPLE, "--epochs", 3)
    accuracy = re.search(r"Accuracy on the test images: ([\d.]+)%", output)
    assert float(accuracy[1]) > 85, output
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} >= {"last.ckpt"}
