"""Every test here: no run in the environment but the one that it starts."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("SPRINGLINE_RUN", "SPRINGLINE_RANK", "SPRINGLINE_WORKERS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
