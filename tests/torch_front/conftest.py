"""Every test here: one thread for torch, alone unless it says otherwise."""

import pytest
import torch

from springline.center.member import MemoryMember

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No run in the environment, and the same random numbers in every test."""
    for name in ("SPRINGLINE_RUN", "SPRINGLINE_RANK", "SPRINGLINE_WORKERS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


@pytest.fixture
def team(monkeypatch):
    """`team(n, make)` returns what `make()` makes as each of n workers, one after the other.

    A synchronous rule would wait for all of them in the first.
    """
    made = []

    def team(workers, make):
        monkeypatch.setenv("SPRINGLINE_WORKERS", str(workers))
        for rank in range(workers):
            monkeypatch.setenv("SPRINGLINE_RANK", str(rank))
            with monkeypatch.context() as patch:
                patch.setattr(MemoryMember, "barrier", lambda self: None)
                made.append(make())
        return made[-workers:]

    yield team
    for opt in made:
        opt.worker.finished = True  # as after an error: leave without an exchange
        opt.worker.member.leave()
