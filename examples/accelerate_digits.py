"""accelerate: its loop as it is, with springline's Accelerator in place of its own.

    python examples/accelerate_digits.py                         one worker alone
    springline run --workers 2 examples/accelerate_digits.py     two workers and their center

Each worker trains on its own part of scikit-learn's digits, and saves and reloads a state of its
own; rank 0 writes the center.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import springline
from springline.integrations.accelerate import Accelerator, shard
from springline.torch import wrap

TESTS = 500  # images that nobody learns from


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(found.data).float()[order] / 16
    labels = torch.from_numpy(found.target)[order]
    data = TensorDataset(images[TESTS:], labels[TESTS:])
    loader = shard(DataLoader(data, 16, shuffle=True, drop_last=True), accelerator.device)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    opt = wrap("average", adamw, model=model, period=10)
    network, optimizer = accelerator.prepare(model, opt)
    if springline.start_step() and accelerator.has_state(args.out / "state"):
        accelerator.load_state(args.out / "state")  # the center's weights replace those in it

    for _epoch, batches in springline.epochs(loader, args.epochs):  # after a restart, what is left
        for inputs, targets in batches:
            with accelerator.accumulate(network):
                loss = nn.functional.cross_entropy(network(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            springline.log(loss=loss.item())
        accelerator.save_state(args.out / "state")

    if opt.final():  # waits for all workers; true on one of them
        optimizer.eval()  # the model is the center from here on
        with torch.no_grad():
            right = network(images[:TESTS]).argmax(1) == labels[:TESTS]
        accelerator.save_model(model, args.out / "final")
        springline.report(f"Accuracy of the center: {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
