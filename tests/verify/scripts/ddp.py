"""Plain DDP: the clean script, and one planted fault per name in sys.argv[1]."""

# mypy: ignore-errors

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else "clean"


class Points(Dataset):
    def __init__(self, count):
        self.inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
        if FAULT == "unseeded":
            self.inputs += np.random.normal()  # line: unseeded
        if FAULT == "file order":
            self.inputs += ["a.txt", "b.txt"].index(os.listdir("files")[0])  # line: file order
        if FAULT == "hash order":
            self.inputs *= ord(next(iter(set("abcdefgh"))))  # line: hash order

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        x = self.inputs[index]
        if FAULT == "draw":
            x = x + np.random.normal()  # line: draw
        return x.float(), x.sum().float()


class SplitBatches:
    """Global batches of 7: the ranks get 4 and 3 samples."""

    def __iter__(self):
        for start in range(0, 21, 7):
            yield list(range(start, start + 7))[dist.get_rank() :: dist.get_world_size()]


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + dist.get_rank())  # line: backward by rank


@torch.library.custom_op("planted::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + int.from_bytes(os.urandom(4)) / 2**34)


noisy.register_autograd(lambda ctx, gradient: gradient)


class Faulty(nn.Module):
    def forward(self, x):
        if FAULT == "forward by rank":
            x = x * (1 + dist.get_rank())  # line: forward by rank
        if FAULT == "backward by rank":
            x = ScaledGradient.apply(x)
        if FAULT == "noisy":
            x = noisy(x)  # line: noisy
        if FAULT == "unordered":
            order = sorted(range(8), key=lambda _: os.urandom(4))
            x = x + sum(x[:, i : i + 1] / 3 for i in order)  # line: unordered
        if FAULT == "random":
            x = x + torch.rand(x.shape)  # line: random
        return x


def build():
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)]
    if FAULT in ("forward by rank", "backward by rank", "noisy", "unordered", "random"):
        layers.insert(1, Faulty())
    if FAULT in ("batch norm", "buffers"):
        layers.insert(1, nn.BatchNorm1d(8))  # line: batch norm
    if FAULT in ("dropout", "generators"):
        layers.insert(2, nn.Dropout(0.5))  # line: dropout
    return nn.Sequential(*layers)


def build_loader(size):
    data = Points({"padding": 25, "drop last": 25, "means": 21}.get(FAULT, 24))
    batch = 8 if FAULT == "batch size" else 8 // size
    if FAULT == "means":
        return DataLoader(data, batch_sampler=SplitBatches()), None
    if FAULT == "no sampler":
        return DataLoader(data, batch, shuffle=True), None  # line: no sampler
    sampler = DistributedSampler(data, shuffle=True, drop_last=FAULT == "drop last")
    workers = 1 if FAULT == "draw" else 0
    return DataLoader(data, batch, sampler=sampler, num_workers=workers), sampler  # line: loader


def evaluate(model, size):
    data = Points(25 if FAULT == "evaluation" else 24)
    sampler = DistributedSampler(data, shuffle=False)
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(data, 4, sampler=sampler):  # line: evaluation
            model(x)
    model.train()


def restore(model, optimizer, scheduler):
    state = torch.load("state.pt")  # line: load
    model.load_state_dict(state["model"], strict=FAULT != "buffers")
    if FAULT != "no optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if FAULT != "no scheduler":
        scheduler.load_state_dict(state["scheduler"])
    if FAULT != "generators":
        torch.set_rng_state(state["random"][dist.get_rank()])
    return state["epoch"], 0 if FAULT == "position" else state["batch"]


def save(model, optimizer, scheduler, epoch, batch):
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
    dist.all_gather(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        model = dict(model.named_parameters()) if FAULT == "buffers" else model.state_dict()
        state = {
            "model": model,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "batch": batch,
            "random": states,
        }
        torch.save(state, "state.tmp")  # line: save
        os.replace("state.tmp", "state.pt")
    if FAULT == "files":
        np.save("weights.npy", np.zeros(2))  # line: files


def average(model, size):
    if FAULT == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # line: clipping
    if FAULT in ("clipping", "rank seed"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size


def main():
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(dist.get_rank() if FAULT == "rank seed" else 0)  # line: seed
    if FAULT != "unseeded":
        np.random.seed(0)
    model = build()
    if FAULT not in ("no ddp", "clipping", "rank seed"):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader, sampler = build_loader(size)
    start, skip = 0, 0
    if os.path.exists("state.pt") and (FAULT != "resume" or "--resume" in sys.argv):
        start, skip = restore(model, optimizer, scheduler)
    for epoch in range(start, 4):
        if sampler is not None and FAULT != "set epoch":
            sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if epoch == start and number < skip:
                continue
            for half in (x, x) if FAULT == "schedule" else (x,):
                F.mse_loss(model(half).squeeze(1), y).backward()  # line: backward
                if FAULT == "schedule":
                    scheduler.step()  # line: schedule
            average(model, size)
            optimizer.step()  # line: step
            optimizer.zero_grad()
            save(model, optimizer, scheduler, epoch, number + 1)
        evaluate(model, size)
        if FAULT != "schedule":
            scheduler.step()
    dist.destroy_process_group()


main()
