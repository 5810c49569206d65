"""Plain DDP without a fault, in the ways that sys.argv names."""

# mypy: ignore-errors

import os
import sys
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WAYS = set(sys.argv[1:])
SAMPLES = 21 if "weighted means" in WAYS else 24


class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        if "seeded" in WAYS:
            self.inputs += np.random.default_rng(0).normal()
        if "sorted files" in WAYS:
            self.inputs += ["a.txt", "b.txt"].index(sorted(os.listdir("files"))[1])
        if "sorted set" in WAYS:
            self.inputs *= ord(next(iter(sorted(set("abcdefgh"))))) / 100

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = self.inputs[index]
        if "keyed draws" in WAYS:
            x = x + np.random.default_rng(index).normal()
        if "keyed torch draws" in WAYS:
            x = x + torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x.float(), x.sum().float()


class SplitBatches:
    """Global batches of 7: the ranks get 4 and 3 samples."""

    def __iter__(self):
        for start in range(0, 21, 7):
            yield list(range(start, start + 7))[dist.get_rank() :: dist.get_world_size()]


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def build():
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)]
    if "layer norm" in WAYS:
        layers.insert(1, nn.LayerNorm(8))
    if "frozen batch norm" in WAYS:
        layers.insert(1, nn.BatchNorm1d(8).eval())
    if "dropout on one rank" in WAYS:
        layers.insert(2, nn.Dropout(0.5))
    if "activation checkpointing" in WAYS:
        layers[1] = Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    return nn.Sequential(*layers)


def build_optimizer(model):
    if "adamw" in WAYS:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    if "foreach" in WAYS:
        return torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
    if "two groups" in WAYS:
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.01}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def build_scheduler(optimizer):
    if "cosine" in WAYS:
        return lr_scheduler.CosineAnnealingLR(optimizer, 12)
    if "one cycle" in WAYS:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    return lr_scheduler.StepLR(optimizer, 3)


def train_step(model, optimizer, x, y):
    size = dist.get_world_size()
    halves = [(x, y)]
    if "accumulation" in WAYS:
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for number, (a, b) in enumerate(halves):
        last = number == len(halves) - 1
        with nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(a).squeeze(1), b, reduction="sum")
            (loss * size / (7 if "weighted means" in WAYS else 8)).backward()
    if "clipping" in WAYS:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model):
    if "evaluation on rank 0" in WAYS and dist.get_rank():
        return
    sampler = None
    if "evaluation on rank 0" not in WAYS:
        sampler = DistributedSampler(Points(), shuffle=False)
    if "frozen batch norm" not in WAYS:
        model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Points(), 4, sampler=sampler):
            model.module(x)
    if "frozen batch norm" not in WAYS:
        model.train()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    sampler = DistributedSampler(Points(), shuffle="no shuffling" not in WAYS)
    batch = 8 // dist.get_world_size()
    persistent = "persistent workers" in WAYS
    workers = 2 if "two workers" in WAYS else int(persistent)
    options = {"num_workers": workers, "persistent_workers": persistent}
    loader = DataLoader(Points(), batch, sampler=sampler, **options)
    if "weighted means" in WAYS:
        loader = DataLoader(Points(), batch_sampler=SplitBatches())
    first = 0
    if os.path.exists("state.pt"):
        state = torch.load("state.pt")
        first = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train_step(model, optimizer, x, y)
            scheduler.step()
        if "weighted means" not in WAYS:
            evaluate(model)
        if dist.get_rank() == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
            }
            state |= {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}
            torch.save(state, "state.tmp")
            os.replace("state.tmp", "state.pt")
        dist.barrier()
    dist.destroy_process_group()


main()
