"""One worker of a run that torchft recorded: `springline run torch_torchft.py NAME OUT`."""

import json
import sys
from pathlib import Path

import torch

import springline
from recorded import DATA, TORCHFT, start
from springline.torch import DiLoCoOptimizer

INNERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Model(torch.nn.Module):
    """`y = x·w + b`, as it was recorded."""

    def __init__(self):
        super().__init__()
        for name, value in start().items():
            setattr(self, name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, x):
        return x @ self.w + self.b


def outer(parameters, kind, rate, momentum=0.0):
    """Torch's own, as torchft had it."""
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=kind == "nesterov")


def main(name, out):
    """Train, and write down every step and the center after it."""
    run, rank, model = TORCHFT[name], springline.rank(), Model()
    inner, rate = run["inner"]
    opt = DiLoCoOptimizer(
        INNERS[inner](model.parameters(), lr=rate),
        model=model,
        outer=lambda parameters: outer(parameters, *run["outer"]),
        fragments=[["w"], ["b"]] if run["fragments"] == 2 else 1,
        **{key: run[key] for key in ("period", "delay", "mixing")},
    )
    rows = []
    for step in springline.steps(run["steps"]):
        inputs, targets = (torch.from_numpy(part[step]) for part in DATA[rank])
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        opt.step()
        x = {key: p.tolist() for key, p in model.named_parameters()}
        c = {key: value.tolist() for key, value in opt.worker.center.values().items()}
        rows.append([x, c])
    (Path(out) / f"{rank}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
