import torch
from torch import nn

from springline.torch import ModelAverageOptimizer

model = nn.Linear(3, 2)
matrices, rest = [model.weight], [model.bias]
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
g, d = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (G, D))
