"""Mixed precision with bfloat16: the loop is torch's own, and the center is float32.

    springline run --workers 2 examples/mixed_precision.py                    autocast
    springline run --workers 2 examples/mixed_precision.py --all-bfloat16     parameters as well

With autocast the network computes in bfloat16 and its parameters are float32. With bfloat16
parameters the worker has half the memory and eight bits of precision; the center still adds up in
float32, so that small differences between workers are not lost there.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from data import Bytes, Digits, mnist
from torch import Tensor, nn

import springline
from springline.torch import ElasticAverageOptimizer

BATCH = 64


def tensors(images: Bytes, labels: Bytes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.from_numpy(images) / 255).to(dtype), torch.from_numpy(labels).long()


def batch(data: Digits, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng([springline.rank(), step])
    rows = random.integers(len(data.images), size=BATCH)
    return tensors(data.images[rows], data.labels[rows], dtype)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500, help="of each worker")
    parser.add_argument("--all-bfloat16", action="store_true", help="parameters in bfloat16 too")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.all_bfloat16 else torch.float32
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=not args.all_bfloat16)
    data = mnist()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    opt = ElasticAverageOptimizer(adamw, model=model, period=5)
    for step in springline.steps(args.steps):
        images, labels = batch(data, step, dtype)
        with mixed:
            loss = nn.functional.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        springline.log(loss=loss.item())
    if not opt.final():
        return
    images, labels = tensors(data.test_images, data.test_labels, dtype)
    with opt.center_weights(), torch.no_grad(), mixed:
        scores = model(images)
    right = (scores.argmax(1) == labels).float().mean().item()
    what = f"Parameters in {dtype}, computed in {scores.dtype}"
    springline.report(f"{what}, accuracy of the center {right:.2%}")


if __name__ == "__main__":
    main()
