"""Five classes of random points; how to run it stands in docs/migration/ddp.md."""

import torch
import torch.nn.functional as F
from torch import nn

import shoal


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


world = shoal.init()
torch.manual_seed(0)
inputs = torch.randn(1000, 20)
data = torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

parallel = shoal.parallelize(model, world)
optimizer = sgd(parallel)
loader = shoal.Loader(data, world, batch_size=64)
for batch in loader.epochs(10):
    optimizer.zero_grad()
    for micro in batch:
        batch.backward(mean=loss(parallel(micro[0]), micro), count=len(micro[1]))
    batch.finish(parallel)
    optimizer.step()

shoal.export(model, "model.pt")
