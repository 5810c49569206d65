"""Autoencoder with a learned observation noise per feature."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AutoEncoder(nn.Module):
    def __init__(self, d=12, z=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 16), nn.Tanh(), nn.Linear(16, z))
        self.dec = nn.Sequential(nn.Linear(z, 16), nn.Tanh(), nn.Linear(16, d))

    def forward(self, x):
        return self.dec(self.enc(x))


class GaussianNLL(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.log_sigma = nn.Parameter(torch.zeros(d))

    def forward(self, recon, x):
        return (0.5 * ((x - recon) / self.log_sigma.exp()) ** 2 + self.log_sigma).sum(1).mean()


def setup():
    dist.init_process_group("gloo")
    torch.manual_seed(123)
    return dist.get_rank(), dist.get_world_size()


def main():
    rank, world = setup()
    mix = torch.randn(3, 12, generator=torch.Generator().manual_seed(8))
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(9)) @ mix
    sampler = DistributedSampler(x, shuffle=True)
    loader = DataLoader(TensorDataset(x), batch_size=16 // world, sampler=sampler)
    model = DDP(AutoEncoder())
    criterion = GaussianNLL()
    params = list(model.parameters()) + list(criterion.parameters())
    opt = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    epoch = 0
    if os.path.exists("ae.ckpt"):
        ck = torch.load("ae.ckpt")
        model.load_state_dict(ck["model"])
        criterion.load_state_dict(ck["criterion"])
        opt.load_state_dict(ck["opt"])
        epoch = ck["epoch"]
    for epoch in range(epoch, 3):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            loss = criterion(model(batch), batch)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "criterion": criterion.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}, "ae.ckpt")
            print("epoch", epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
