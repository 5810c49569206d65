"""A plain script, and the differences from `converted_script.py` that its arguments plant."""

# mypy: ignore-errors

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ways = sys.argv[1:]
torch.manual_seed(1 if "seed" in ways else 0)
x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
rate = 0.2 if "dropout" in ways else 0.0
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(rate), nn.Linear(8, 1))
options = {"batch_size": 8, "shuffle": "shuffle" in ways}
if "ddp" in ways:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    size = int(os.environ["WORLD_SIZE"])
    options = {"batch_size": 8 // size, "sampler": DistributedSampler(data, shuffle=False)}
loader = DataLoader(data, **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 if "rate" in ways else 0.01)
halves = 2 if {"accumulation", "undivided"} & {*ways} else 1
for _ in range(3 if "shorter" in ways else 4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        for a, b in zip(inputs.chunk(halves), targets.chunk(halves), strict=True):
            if "vector" in ways:
                losses = (model(a) - b).square()
                losses.backward(torch.ones_like(losses))
                continue
            loss = F.mse_loss(model(a), b, reduction="sum" if "sum" in ways else "mean")
            loss = loss / halves if "accumulation" in ways else loss
            loss = 3 * loss if "factor" in ways else loss
            loss.backward()
        factor = 8 if "sum" in ways else 2 if "undivided" in ways else 3 if "factor" in ways else 1
        if "corrected" in ways:  # the same parameters
            for parameter in model.parameters():
                parameter.grad /= factor
        if "clip" in ways:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
