"""Classify random points; see docs/migration/fsdp2.md."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
cuda = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
device = cuda if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
inputs = torch.randn(960, 20)
data = TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = Net().to(device)

mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=f"run/epoch-{epoch + 1}")

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
