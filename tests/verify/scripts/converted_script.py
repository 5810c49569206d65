"""`plain_script.py`, converted. It works with a Step, or with the argument "loop" without one."""

# mypy: ignore-errors

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

ways = sys.argv[1:]


def loss(output, batch):
    return F.mse_loss(output, batch[1], reduction="sum"), len(output)


with shoal.init(seed=0) as world:
    torch.manual_seed(0)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    rate = 0.2 if "dropout" in ways else 0.0
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(rate), nn.Linear(8, 1))
    if "ranks" in ways:
        with torch.no_grad():
            model[0].weight *= world.size
    model = shoal.parallelize(model, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    halves = 2 if "accumulation" in ways else 1
    loader = shoal.Loader(data, world, batch_size=8, micro_batches=halves, shuffle="shuffle" in ways)
    step = None if "loop" in ways else shoal.Step(model, optimizer, shoal.Task(loss))
    for batch in loader.epochs(4):
        if step is not None:
            step(batch)
            continue
        optimizer.zero_grad()
        for micro in batch:
            total, count = loss(model(micro[0]), micro)
            batch.backward(total=total, count=count)
        batch.finish(model)
        optimizer.step()
