"""Classify random points; see docs/migration/ddp.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


world = shoal.init()
torch.manual_seed(0)
inputs = torch.randn(1000, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

shoal.train(
    model,
    shoal.Task(loss),
    data,
    directory="run",
    optimizer=sgd,
    batch_size=64,
    epochs=10,
    world=world,
)
shoal.export(model, "model.pt")
