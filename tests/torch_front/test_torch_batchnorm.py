"""Two workers train a BatchNorm network on real data; the center is as good as the best of them."""

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch_training import RULES, wrap

WORKERS, EPOCHS, BATCH = 2, 8, 32
MARGIN = 0.01  # of the accuracy: five of the 497 test images
STEPS = EPOCHS * -(-650 // BATCH)


@pytest.fixture(scope="module")
def digits():
    """1,300 images to train and 497 to test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (images[:1300], labels[:1300]), (images[1300:], labels[1300:])


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def accuracy(model, data):
    images, labels = data
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def batches(data, rank):
    """A worker's own half of the data, in an order of its own."""
    images, labels = (part[rank::WORKERS] for part in data)
    order = torch.Generator().manual_seed(rank)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels), generator=order).split(BATCH):
            yield images[rows], labels[rows]


def train_all(opts, data, together):
    """All workers step side by side."""

    schedulers = {o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, STEPS) for o in opts}

    def step(opt, images, labels):
        opt.zero_grad()
        nn.functional.cross_entropy(opt._model(images), labels).backward()
        opt.step()
        schedulers[opt].step()

    for both in zip(*(batches(data, rank) for rank in range(WORKERS)), strict=True):
        calls = [lambda o=o, b=b: step(o, *b) for o, b in zip(opts, both, strict=True)]
        if opts[0].worker.rule.rounds:
            together(*calls)
        else:
            for call in calls:
                call()


@pytest.mark.parametrize("rule", RULES)
def test_the_center_is_as_good_as_the_best_worker(rule, digits, team, together, directory):
    training, test = digits

    def make():
        model = convolutions()
        inner = torch.optim.Adam(model.parameters())
        return wrap(rule, inner, 5, model=model, center=directory, timeout=60)

    opts = team(WORKERS, make)
    train_all(opts, training, together)
    assert STEPS % 5  # worker and center differ
    best = max(accuracy(opt._model, test) for opt in opts)
    with opts[0].center_weights():
        of_center = accuracy(opts[0]._model, test)
    assert of_center >= best - MARGIN
    assert best > 0.95
    opts[0].save_center(directory.parent / "center.safetensors")
    fresh = convolutions()
    fresh.load_state_dict(load_file(directory.parent / "center.safetensors"))
    assert accuracy(fresh, test) == of_center
    # With the buffers of an untrained network the same weights are worth much less.
    for module in fresh:
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    assert accuracy(fresh, test) < of_center - 0.1
