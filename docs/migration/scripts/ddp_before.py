"""Classify random points; see docs/migration/ddp.md."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
cuda = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
device = cuda if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
inputs = torch.randn(1000, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

model.to(device)
parallel = DistributedDataParallel(model)
optimizer = sgd(parallel)
sampler = DistributedSampler(data)
loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for batch in loader:
        moved = [part.to(device) for part in batch]
        optimizer.zero_grad()
        loss(parallel(moved[0]), moved).backward()
        optimizer.step()

if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
