"""Classify random points; see docs/migration/fsdp2.md."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.narrow(F.relu(self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


world = shoal.init(layout="shard=-1")
torch.manual_seed(0)
inputs = torch.randn(960, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = Net()

model = shoal.parallelize(model, world, shoal.FSDP(modules=("layers.*",)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = shoal.Loader(data, world, batch_size=64)
with shoal.Run("run", model, loader, optimizer=optimizer) as run:
    run.restore()
    for batch in loader.epochs(10):
        for x, y in batch:
            loss = F.cross_entropy(model(x), y)
            batch.backward(mean=loss, count=len(y))
        batch.finish(model, clip=1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.tick(every=15)
    run.save()

shoal.export(model, "model.pt")
