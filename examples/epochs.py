"""Epochs and a DataLoader: every worker sees its own part of the data, in its own order.

    python examples/epochs.py                        one worker, all of the data
    springline run --workers 2 examples/epochs.py    two workers, half of it each

A worker that is killed goes on in the middle of the epoch in which its rank was, with the next
batch of the same order: `springline.epochs` gives out only what is left.
"""

from __future__ import annotations

import argparse

import torch
from data import Digits, mnist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import springline
from springline.torch import ModelAverageOptimizer, ResumableSampler

BATCH = 64


def train(
    model: nn.Module, data: TensorDataset, test: Digits, epochs: int
) -> ModelAverageOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = ModelAverageOptimizer(inner, model=model, period=10)
    loader = DataLoader(data, BATCH, sampler=ResumableSampler(data))
    for epoch, batches in springline.epochs(loader, epochs):
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            springline.log(loss=loss.item())
        with opt.center_weights():
            print(f"epoch {epoch}: accuracy of the center {accuracy(model, test):.2%}", flush=True)
    return opt


def tensors(data: Digits, count: int) -> TensorDataset:
    images, labels = data.images[:count], data.labels[:count]
    return TensorDataset(torch.from_numpy(images) / 255, torch.from_numpy(labels).long())


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    guesses = model(torch.from_numpy(data.test_images) / 255).argmax(1)
    return float((guesses == torch.from_numpy(data.test_labels)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="of the training data, to use")
    args = parser.parse_args()
    data = mnist()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = train(model, tensors(data, args.images), data, args.epochs)
    if opt.final():
        with opt.center_weights():
            springline.report(f"Accuracy on the test images: {accuracy(model, data):.2%}")


if __name__ == "__main__":
    main()
