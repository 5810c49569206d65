"""Classify random points; see docs/migration/lightning.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def configure_optimizers(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


world = shoal.init()
torch.manual_seed(0)
inputs = torch.randn(1200, 20)
labels = (inputs @ torch.randn(20, 5)).argmax(1)
training = TensorDataset(inputs[:960], labels[:960])
validation = TensorDataset(inputs[960:], labels[960:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

shoal.train(
    model,
    shoal.Task(loss),
    training,
    directory="run",
    optimizer=configure_optimizers,
    batch_size=64,
    epochs=10,
    clip=1.0,
    world=world,
    validation=shoal.Validation(
        dataset=validation,
        metrics={"accuracy": shoal.Accuracy()},
        monitor="accuracy",
        mode="max",
        patience=5,
    ),
)
shoal.export(model, "model.pt")
