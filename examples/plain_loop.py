"""A plain training loop, and the same with springline: before and after.

    python examples/plain_loop.py --plain                before
    python examples/plain_loop.py                        after: one worker
    springline run --workers 2 examples/plain_loop.py    after: two workers, one model

The mean of one worker is that worker: alone, both loops end with the same loss to the bit.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from data import Bytes, Digits, mnist
from torch import Tensor, nn

import springline
from springline.torch import ModelAverageOptimizer

BATCH = 64


def train_before(data: Digits, steps: int) -> float:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = loss_of(model, *batch(data, step, 0, 1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return evaluate(model, data)


def train_after(data: Digits, steps: int) -> float | None:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = ModelAverageOptimizer(inner, model=model, period=10)
    for step in springline.steps(steps):
        loss = loss_of(model, *batch(data, step, springline.rank(), springline.workers()))
        opt.zero_grad()
        loss.backward()
        opt.step()
        springline.log(loss=loss.item())
    if not opt.final():  # it waits for all workers, and is true on one of them
        return None
    with opt.center_weights():
        return evaluate(model, data)


# From here on nothing knows of springline.


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(data: Digits, step: int, rank: int, workers: int) -> tuple[Tensor, Tensor]:
    """Random images of this step, from the worker's own part of the data."""
    own = np.arange(rank, len(data.labels), workers)
    rows = np.random.default_rng([rank, step]).choice(own, BATCH)
    return tensors(data.images[rows], data.labels[rows])


def tensors(images: Bytes, labels: Bytes) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(images) / 255, torch.from_numpy(labels).long()


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


@torch.no_grad()
def evaluate(model: nn.Module, data: Digits) -> float:
    return loss_of(model, *tensors(data.test_images, data.test_labels)).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="the loop without springline")
    parser.add_argument("--steps", type=int, default=500, help="of each worker")
    args = parser.parse_args()
    train = train_before if args.plain else train_after
    loss = train(mnist(), args.steps)
    if loss is not None:
        springline.report(f"Loss on the test images: {loss!r}")


if __name__ == "__main__":
    main()
