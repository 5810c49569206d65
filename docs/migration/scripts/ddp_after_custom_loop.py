"""Classify random points; see docs/migration/ddp.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


world = shoal.init()
torch.manual_seed(0)
inputs = torch.randn(1000, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

parallel = shoal.parallelize(model, world)
optimizer = sgd(parallel)
loader = shoal.Loader(data, world, batch_size=64)
for batch in loader.epochs(10):
    for micro in batch:
        mean = loss(parallel(micro[0]), micro)
        batch.backward(mean=mean, count=len(micro[1]))
    batch.finish(parallel)
    optimizer.step()
    optimizer.zero_grad()

shoal.export(model, "model.pt")
