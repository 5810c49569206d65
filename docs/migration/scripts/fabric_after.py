"""Classify random points; see docs/migration/lightning.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

world = shoal.init()
torch.manual_seed(0)
inputs = torch.randn(960, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

model = shoal.parallelize(model, world)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
loader = shoal.Loader(data, world, batch_size=64)
for batch in loader.epochs(10):
    for x, y in batch:
        loss = F.cross_entropy(model(x), y)
        batch.backward(mean=loss, count=len(y))
    batch.finish(model, clip=1.0)
    optimizer.step()
    optimizer.zero_grad()

shoal.export(model, "model.pt")
