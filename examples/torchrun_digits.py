"""A process group as the center: for those who start with `torchrun`, on one machine or many.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_digits.py

On several machines each starts the same command with `--nnodes`, `--rdzv-endpoint` and the like,
and with SPRINGLINE_RUN set to a directory where rank 0 keeps its checkpoints. Set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there: without it half of torchrun's restarts fail.

Each rank learns from its own part of scikit-learn's handwritten digits. The center is on every
rank, and rank 0 says how good it is.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import springline
from springline.torch import ElasticAverageOptimizer, ModelAverageOptimizer

TESTS = 500  # images that nobody learns from
BATCH = 32


def train(rule: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, inner = network()
    world = dist.group.WORLD  # on several machines it is the default
    opt: ModelAverageOptimizer | ElasticAverageOptimizer
    if rule == "average":
        opt = ModelAverageOptimizer(inner, model=model, period=10, center=world, timeout=60)
    else:
        opt = ElasticAverageOptimizer(inner, model=model, period=10, center=world, timeout=60)
    images, labels = digits()
    own = np.arange(TESTS + rank, len(labels), ranks)
    for step in springline.steps(steps):  # a restarted group goes on from its last checkpoint
        rows = np.random.default_rng([rank, step]).choice(own, BATCH)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        springline.log(loss=loss.item())
    if opt.final():
        with opt.center_weights(), torch.no_grad():
            right = model(images[:TESTS]).argmax(1) == labels[:TESTS]
        springline.report(f"Accuracy of the center under {rule}: {right.float().mean():.1%}")
    dist.destroy_process_group()


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8×8 pixels from 0 to 1, and what they show; always in the same order."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return torch.from_numpy(found.data[order] / 16).float(), torch.from_numpy(found.target[order])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("average", "elastic"), default="average")
    parser.add_argument("--steps", type=int, default=300, help="of each rank")
    args = parser.parse_args()
    train(args.rule, args.steps)


if __name__ == "__main__":
    main()
