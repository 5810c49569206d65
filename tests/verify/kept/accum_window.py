"""Regression with a fixed micro-batch per process; the accumulation steps follow from the number of processes."""
import argparse
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--micro", type=int, default=4)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--epochs", type=int, default=3)
    return p.parse_args()


def windows(loader, size):
    """Lists of micro-batches, the last one of an epoch may be shorter."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    accum = args.global_batch // (args.micro * world)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 1), nn.Flatten(0))
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(86, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, 0] * x[:, 1] + x[:, 2])
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=args.micro, sampler=sampler)
    start = 0
    if os.path.exists("reg.pt"):
        ck = torch.load("reg.pt")
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        start = ck["epoch"]
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for window in windows(loader, accum):
            for inputs, y in window:
                loss = (model(inputs) - y).pow(2).mean() / accum
                loss.backward()
            opt.step()
            opt.zero_grad()
        if rank == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}, "reg.pt")
            print("epoch", epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
