"""An ordinary script with accelerate, and what its tests look at afterwards."""

import argparse
import json
import os
import signal
from pathlib import Path

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import springline
from springline.integrations.accelerate import Accelerator, shard
from springline.torch import wrap

ROWS, BATCH, EPOCHS = 40, 4, 3
ACCUMULATED = 2  # batches of a step; the last step of an epoch has what is left
FAR = 1000.0  # a weight that no training comes to


class Rows(Dataset):
    """Random numbers, and which of them were taken."""

    def __init__(self, rows=ROWS):
        self.rows = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
        self.taken = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.taken.append(index)
        return self.rows[index]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))


def inner(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loader_of(data):
    return DataLoader(data, BATCH, shuffle=True)


def train_on(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill", action="store_true", help="rank 1, in its second epoch")
    parser.add_argument("--plain", action="store_true", help="accelerate's own Accelerator")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    kind = accelerate.Accelerator if args.plain else Accelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    data, bare, rank = Rows(), network(), springline.rank()
    opt = wrap("average", inner(bare), model=bare, period=2)
    loader = shard(loader_of(data), accelerator.device)
    model, optimizer = accelerator.prepare(bare, opt)
    moments, weight = [], 0.0
    if springline.start_step():
        accelerator.load_state(args.out / "state")
        moments = [int(value["step"]) for value in optimizer.state.values()]
        weight = bare[0].weight[0, 0].item()
    killed = args.out / "killed"
    for epoch, batches in springline.epochs(loader, EPOCHS):
        for n, batch in enumerate(batches):
            train_on(accelerator, model, optimizer, batch)
            if args.kill and (epoch, n, rank) == (1, 3, 1) and not killed.exists():
                killed.touch()
                nn.init.constant_(bare[0].weight, FAR)
                accelerator.save_state(args.out / "state")
                (args.out / "state" / "worker-1.new").mkdir()  # cut short
                os.kill(os.getpid(), signal.SIGKILL)
        if not args.plain:
            accelerator.save_state(args.out / "state")
    if opt.final():
        with opt.center_weights():
            accelerator.save_model(bare, args.out / "final")
    found = {
        "began": springline.start_step(),
        "made": opt.worker.local_step,
        "moments": moments,
        "weight": weight,
        "main": accelerator.is_main_process,
        "wrapped": type(model).__name__,
        "version": opt.worker.center.version,
        "rows": data.taken,
    }
    (args.out / f"rank-{rank}.json").write_text(json.dumps(found))
    if args.plain:
        Accelerator(cpu=True)


if __name__ == "__main__":
    main()
