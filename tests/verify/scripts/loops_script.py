"""DDP with the loaders, samplers and schedulers that sys.argv[1] names."""

# mypy: ignore-errors

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

WAY = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 6))
own = range(rank, 24, size)
batch = 8 // size


def build_model():
    if WAY == "sum, then clip":
        return nn.Sequential(nn.Linear(6, 1))
    return DistributedDataParallel(nn.Linear(6, 1))


def build_loader(epoch):
    if WAY == "subset":
        return DataLoader(Subset(data, own), batch)
    if WAY == "nested subset":
        order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))
        return DataLoader(Subset(Subset(data, order), own), batch)
    if WAY == "split":
        train, _ = random_split(data, [16, 8], torch.Generator().manual_seed(0))
        sampler = DistributedSampler(train)
        sampler.set_epoch(epoch)
        return DataLoader(train, batch, sampler=sampler)
    if WAY == "sampler in loop":
        return DataLoader(data, batch, sampler=DistributedSampler(data))  # line: sampler
    if WAY == "generator in loop":
        same = torch.Generator().manual_seed(0)
        return DataLoader(data, batch, shuffle=True, generator=same)  # line: generator
    if WAY in ("other seeds", "other epochs"):
        sampler = DistributedSampler(data, seed=rank if WAY == "other seeds" else 0)
        sampler.set_epoch(0 if WAY == "other epochs" and rank else epoch)
        return DataLoader(data, batch, sampler=sampler)  # line: others
    if WAY == "part in loop":
        part = TensorDataset(torch.randn(16, 6))
        return DataLoader(part, batch, sampler=DistributedSampler(part))
    if WAY == "epoch in loop":
        sampler = DistributedSampler(data)
        sampler.set_epoch(epoch)
        return DataLoader(data, batch, sampler=sampler)
    return DataLoader(data, batch, sampler=own)


def clip_sum(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)


def evaluate(model):
    if WAY == "subset":
        for (x,) in DataLoader(Subset(data, range(rank, 13, size)), 4):
            model.module(x)
    if WAY == "rank 0 evaluates" and rank == 0:
        for (x,) in DataLoader(data, 4):
            model.module(x)


def train_step(model, optimizer, x):
    model(x).square().mean().backward()
    if WAY == "sum, then clip":
        clip_sum(model)
    optimizer.step()
    optimizer.zero_grad()


def train_batch(models, optimizers, schedulers, x):
    for model, optimizer in zip(models, optimizers, strict=True):
        train_step(model, optimizer, x)
    for scheduler in schedulers:
        scheduler.step()
    if WAY == "second scheduler twice":
        schedulers[1].step()  # line: twice


def main():
    models = [build_model() for _ in range(2 if WAY == "two optimizers" else 1)]
    model = models[0]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.99) for optimizer in optimizers]
    schedulers.append(lr_scheduler.LinearLR(optimizers[0], total_iters=5))
    for epoch in range(3):
        for (x,) in build_loader(epoch):
            train_batch(models, optimizers, schedulers, x)
        with torch.no_grad():
            evaluate(model)
        dist.barrier()
    dist.destroy_process_group()


main()
