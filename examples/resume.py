"""Resume after an interruption: the same command again goes on where the run was.

    springline run --run runs/resume examples/resume.py    Ctrl-C in the middle, whenever you like
    springline run --run runs/resume examples/resume.py    goes on, and ends after --steps in all

The run's directory has the center and how far each worker had come. Each takes the center and
counts on from its last exchange: `springline.steps` gives it the steps that are left. So all that
depends on the step, here the batch and the learning rate, is computed from `step`. The inner
optimizer begins with fresh state.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from data import Bytes, Digits, mnist
from torch import Tensor, nn

import springline
from springline.torch import ElasticAverageOptimizer

BATCH = 64
PEAK = 0.1  # of the learning rate


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def tensors(images: Bytes, labels: Bytes) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(images) / 255, torch.from_numpy(labels).long()


def batch(data: Digits, step: int) -> tuple[Tensor, Tensor]:
    """The same images whenever a worker comes to this step."""
    random = np.random.default_rng([springline.rank(), step])
    rows = random.integers(len(data.images), size=BATCH)
    return tensors(data.images[rows], data.labels[rows])


def rate(step: int, steps: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def evaluate(model: nn.Module, data: Digits) -> float:
    images, labels = tensors(data.test_images[:1000], data.test_labels[:1000])
    return nn.functional.cross_entropy(model(images), labels).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000, help="of each worker, in all")
    args = parser.parse_args()
    data = mnist()

    torch.manual_seed(0)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9)
    opt = ElasticAverageOptimizer(sgd, model=model)  # the model now holds the center
    start = springline.start_step()
    print(f"Worker {springline.rank()} starts at step {start}, test loss {evaluate(model, data)}")

    for step in springline.steps(args.steps):
        for group in opt.param_groups:
            group["lr"] = rate(step, args.steps)
        images, labels = batch(data, step)
        loss = nn.functional.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            springline.log(loss=loss.item())
    if opt.final():
        with opt.center_weights():
            springline.report(f"Test loss of the center: {evaluate(model, data)}")


if __name__ == "__main__":
    main()
