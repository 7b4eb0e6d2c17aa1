from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import springline
from springline.torch import ResumableSampler

rank = springline.rank()
dataset = TensorDataset(torch.randn(128, 3), torch.randint(2, (128,)))


class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


def batch(step, rank, workers):
    return dataset[step * workers + rank & 63]


def loss_of(model, pair):
    return nn.functional.cross_entropy(model(pair[0]), pair[1])


def evaluate(model):
    return loss_of(model, dataset[:]).item()


parameters = {"w": np.zeros(3)}
batches = range(20)


def gradients_of(values, number):
    return {"w": values["w"] - number}


def sgd(values, gradients):
    values["w"] -= 0.1 * gradients["w"]


inner = SimpleNamespace(step=sgd)
