"""Every test here: no run in the environment but its own, nor what a trainer left there."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def alone():
    before = dict(os.environ)
    for name in ("SPRINGLINE_RUN", "SPRINGLINE_RANK", "SPRINGLINE_WORKERS", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():  # Lightning's DDP has, before our callback refuses it
        torch.distributed.destroy_process_group()
