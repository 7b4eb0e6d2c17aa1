"""Handwritten digits with BatchNorm: the center has its averages too, and is what is evaluated.

    springline run --workers 2 examples/images.py    two workers, each with half of the images
    python examples/images.py                        one worker alone

With `model=` BatchNorm's running averages travel with the weights: `center_weights()` puts both
into the model for as long as it is evaluated.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from data import Bytes, Digits, mnist
from torch import Tensor, nn

import springline
from springline.torch import ElasticAverageOptimizer

EVALUATE_EVERY = 100  # steps
PEAK = 0.2  # of the learning rate
SHIFT = 2  # pixels, at most


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 9, 10))


def tensors(images: Bytes, labels: Bytes) -> tuple[Tensor, Tensor]:
    """Pixels from −1 to 1, and the classes."""
    return torch.from_numpy(images).unsqueeze(1) / 127.5 - 1, torch.from_numpy(labels).long()


def batch(data: Digits, step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Random images of this step from the worker's own part, shifted a little."""
    random = np.random.default_rng([args.seed, springline.rank(), step])
    own = np.arange(springline.rank(), args.images, springline.workers())
    rows = random.choice(own, args.batch)
    shift = random.integers(-SHIFT, SHIFT, 2, endpoint=True)
    return tensors(np.roll(data.images[rows], shift, (1, 2)), data.labels[rows])


def rate(step: int, steps: int) -> float:
    """Up to the peak in a straight line for a quarter of the steps, then down to 0."""
    done = (step + 1) / (steps + 1)
    return PEAK * min(done / 0.25, (1 - done) / 0.75)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Of all that is shown, how much is right."""
    model.eval()
    guesses = torch.cat([model(part).argmax(1) for part in torch.split(images, 500)])
    model.train()
    return (guesses == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="of each worker")
    add("--period", type=int, default=10, help="τ, local steps between two exchanges")
    add("--batch", type=int, default=128, help="images in a step")
    add("--images", type=int, default=60_000, help="to train on")
    add("--tests", type=int, default=10_000, help="images to test with")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    data = mnist()
    test = tensors(data.test_images[: args.tests], data.test_labels[: args.tests])

    torch.manual_seed(args.seed)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9, nesterov=True)
    opt = ElasticAverageOptimizer(sgd, model=model, period=args.period)
    for step in springline.steps(args.steps):
        for group in opt.param_groups:
            group["lr"] = rate(step, args.steps)
        images, labels = batch(data, step, args)
        loss = nn.functional.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        springline.log(loss=loss.item())
        if step % EVALUATE_EVERY == 0 and springline.rank() == 0:
            with opt.center_weights():
                springline.log(center_accuracy=accuracy(model, *test))
    if not opt.final():
        return
    own = accuracy(model, *test)
    with opt.center_weights():
        center = accuracy(model, *test)
    springline.log(center_accuracy=center)
    who = f"worker {springline.rank()}"
    springline.report(f"Accuracy of {who}: {own:.2%}, of the center: {center:.2%}")


if __name__ == "__main__":
    main()
