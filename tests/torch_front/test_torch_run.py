"""A torch script under the real command: its files hold the model's whole state."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from marks import slow

SCRIPT = """
import torch, springline
from springline.torch import {optimizer}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, x):
        return self.head(self.frozen(self.norm(self.embedding(x))))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = {optimizer}(torch.optim.SGD(trained, lr=0.1), model=model, **{options})
    for step in springline.steps(20):
        tokens = torch.randint(8, (16,))
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
        opt.zero_grad()
        loss.backward()
        opt.step()
        springline.log(loss=loss.item())
    if springline.rank() == 0:
        springline.report("the end of rank 0")
"""
OPTIMIZERS = {
    "ElasticAverageOptimizer": {"period": 3},
    "ModelAverageOptimizer": {"period": 3},
    "AGNOptimizer": {"period": 3},
    "DiLoCoOptimizer": {"period": 4, "fragments": 2, "delay": 1},
    "AsyncDiLoCoOptimizer": {"period": 3, "dynamic_steps": True},
    "SlowMoOptimizer": {"period": 3},
}


@pytest.mark.parametrize(
    "optimizer",
    [
        *("ElasticAverageOptimizer", "DiLoCoOptimizer"),
        *slow("ModelAverageOptimizer", "AGNOptimizer", "AsyncDiLoCoOptimizer", "SlowMoOptimizer"),
    ],
)
def test_the_runs_center_loads_strictly(optimizer, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(optimizer=optimizer, options=OPTIMIZERS[optimizer]))
    command = [sys.executable, "-m", "springline.cli"]
    run = tmp_path / "run"
    start = [*command, "run", "--workers", "2", "--run", run, "--no-live", script]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the end of rank 0" in done.stdout
    exported = tmp_path / "exported.safetensors"
    subprocess.run([*command, "export", run, exported], check=True, capture_output=True)

    names: dict = {"__name__": "train"}
    exec(script.read_text(), names)
    model = names["Net"]()
    for path in (run / "center.safetensors", exported):
        state = load_file(path)
        model.load_state_dict(state)
        assert torch.equal(state["head.weight"], state["embedding.weight"])
        assert state["norm.num_batches_tracked"] == 20
    torch.manual_seed(0)
    assert torch.equal(names["Net"]().frozen.weight, model.frozen.weight)
