import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import springline
from springline.torch import ResumableSampler

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
