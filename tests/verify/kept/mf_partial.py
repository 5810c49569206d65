"""Matrix factorisation with biases; gradients are averaged in one flat buffer."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MF(nn.Module):
    def __init__(self, users=20, items=15, k=4):
        super().__init__()
        self.user, self.item = nn.Embedding(users, k), nn.Embedding(items, k)
        self.user_bias = nn.Parameter(torch.zeros(users))
        self.item_bias = nn.Parameter(torch.zeros(items))
        self.global_bias = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + self.user_bias[u] + self.item_bias[i] + self.global_bias


def average_gradients(params, world):
    grads = [p.grad for p in params if p.dim() > 1]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= world
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def ratings(n=192):
    g = torch.Generator().manual_seed(0)
    u, i = torch.randint(0, 20, (n,), generator=g), torch.randint(0, 15, (n,), generator=g)
    a, b = torch.randn(20, generator=g), torch.randn(15, generator=g)
    return TensorDataset(u, i, 3 + a[u] + b[i] + a[u] * b[i])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MF()
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.5, weight_decay=1e-3)
    data = ratings()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 32 // world, sampler=sampler)
    done = 0
    if os.path.exists("mf.pt"):
        ck = torch.load("mf.pt")
        model.load_state_dict(ck["model"])
        done = ck["epochs"]
    for epoch in range(done, 3):
        sampler.set_epoch(epoch)
        for u, i, r in loader:
            loss = (model(u, i) - r).square().mean()
            model.zero_grad()
            loss.backward()
            average_gradients(params, world)
            opt.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "epochs": epoch + 1}, "mf.pt")
            print("epoch", epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
