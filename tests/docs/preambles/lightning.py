import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, rows, number):
        return self.layer(rows).square().mean()

    def validation_step(self, rows, number):
        self.log("val_loss", self.training_step(rows, number))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model = Model()
train_loader = val_loader = DataLoader(torch.randn(64, 3), 8)
