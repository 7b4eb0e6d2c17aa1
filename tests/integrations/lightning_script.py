"""A Lightning script as users write it: `lightning_script.py KIND [DIES_AT]`.

Its weight has a gradient of -1 and a learning rate of 1: it counts the steps. Each worker prints
what it trains on. The parameters of rank 1 are killed in its first incarnation at step DIES_AT.
"""

import os
import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import springline
from springline.integrations.lightning import Springline

RANK, RUN = springline.rank(), springline.directory()


class Counter(LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch, batch_idx):
        seen, rate = batch.tolist(), self.trainer.optimizers[0].param_groups[0]["decay"]
        print("made", self.trainer.global_step, self.current_epoch, seen, rate, flush=True)
        time.sleep(0.01)
        self.log("weight", self.w.mean())
        return -self.w.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val_weight", self.w.mean())
        self.log("score", (1 if RANK else -1) * float(self.current_epoch))

    def test_step(self, batch, batch_idx):
        self.log("test_weight", self.w.mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([{"params": [self.w], "decay": 100}], lr=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": Countdown(optimizer), "interval": "step"},
        }


class Countdown(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that can be read off: `decay` is 100 minus the steps."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["decay"] = 100 - self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


class Dies(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        mark = RUN / "died"
        if RANK == 1 and trainer.global_step == self.at and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)


class Stops(Callback):
    def on_train_batch_end(self, trainer, *_):
        if RANK == 0 and trainer.global_step == 3:
            springline.stop()


def main(kind, at=0):
    callbacks = [Springline("average", period=2)]
    options = {"max_epochs": 3}
    kept = {"save_last": True}
    if kind == "best":
        kept |= {"monitor": "score", "mode": "max"}
    if kind == "stops":
        callbacks.append(Stops())
        options = {"max_epochs": 1000}
    if kind == "dies":
        callbacks.append(Dies(int(at)))
    if kind == "accumulates":
        callbacks.append(Dies(int(at)))
        options |= {"accumulate_grad_batches": 2}
    if kind == "ddp":
        options |= {"strategy": "ddp", "devices": 1}
    if kind == "many":
        options |= {"devices": 2}
    trainer = Trainer(
        callbacks=[*callbacks, ModelCheckpoint("checkpoints", **kept)],
        logger=CSVLogger("csv", flush_logs_every_n_steps=1),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    model = Counter()
    data = DataLoader(range(40), 4, shuffle=True)
    trainer.fit(model, data, DataLoader(range(4), 4), ckpt_path="last")
    # In one piece each: under torchrun two processes write to the same pipe.
    print(f"after fit {model.w.mean().item()} steps {trainer.global_step}", flush=True)
    tests = DataLoader(range(4), 4)
    path = "best" if kind == "best" else None
    [tested] = trainer.test(model, tests, ckpt_path=path, verbose=False)
    strategy = type(trainer.strategy).__mro__[1].__name__
    print(f"tested {tested['test_weight']} {strategy}", flush=True)
    if trainer.is_global_zero:
        springline.report(f"weight {model.w.mean().item():.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
