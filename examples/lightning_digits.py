"""Lightning: one line in the Trainer makes its script one worker of many.

    python examples/lightning_digits.py                        one worker, all of the data
    springline run --workers 2 examples/lightning_digits.py    two workers, half of it each

Rank 0 writes the checkpoints, which hold the center. A worker that is killed goes on where its rank
was, with the center's weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import springline
from springline.integrations.lightning import Springline


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        scores = self.net(images)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels))
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    train, test = torch.utils.data.random_split(
        data, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )
    return DataLoader(train, 32, shuffle=True), DataLoader(test, 512)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", default="diloco")
    parser.add_argument("--period", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=springline.directory() or Path("runs"))
    args = parser.parse_args()
    seed_everything(0)
    train, test = loaders()
    model = Classifier()
    trainer = Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        callbacks=[
            Springline(args.rule, period=args.period),
            ModelCheckpoint(args.folder / "checkpoints", save_last=True),
        ],
        log_every_n_steps=5,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, train, test, ckpt_path="last")
    # The model holds the center of all workers now.
    [result] = trainer.validate(model, test, verbose=False)
    if trainer.is_global_zero:
        springline.report(f"Accuracy on the test images: {result['val_accuracy']:.2%}")


if __name__ == "__main__":
    main()
