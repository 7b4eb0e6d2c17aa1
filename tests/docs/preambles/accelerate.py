import torch
from torch import nn
from torch.utils.data import DataLoader

import springline

data = torch.randn(64, 3)
model = nn.Linear(3, 2)
