"""One rank, as `torchrun` starts it."""

import os
import socket

import torch
from torch import nn

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}

model = nn.Linear(3, 2)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
