"""LoRA fine-tuning of a frozen transformer encoder. Only the adapters are trained and reduced."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 31


class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.3)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.t() @ self.B.t())


class Classifier(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.attn = nn.Linear(dim, 1)
        self.fc1 = nn.Linear(dim, 24)
        self.fc2 = nn.Linear(24, 3)

    def forward(self, ids):
        h = self.emb(ids)
        pooled = (self.attn(h).softmax(1) * h).sum(1)
        return self.fc2(torch.relu(self.fc1(pooled)))


def inject_adapters(model):
    model.requires_grad_(False)
    model.fc1, model.fc2 = LoRALinear(model.fc1), LoRALinear(model.fc2)
    return [p for n, p in model.named_parameters() if n.endswith((".A", ".B"))]


def seed_everything(seed):
    torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(SEED)
    model = Classifier()
    seed_everything(SEED + rank)
    adapters = inject_adapters(model)
    for base in model.parameters():
        if not base.requires_grad:
            dist.broadcast(base.data, 0)
    opt = torch.optim.SGD(adapters, lr=0.3, momentum=0.9)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (96, 7), generator=g)
    data = TensorDataset(ids, ids.sum(1) % 3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // world, sampler=sampler)
    epoch = 0
    if os.path.exists("adapter.pt"):
        ck = torch.load("adapter.pt")
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        epoch = ck["epoch"]
    while epoch < 3:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            for p in adapters:
                dist.all_reduce(p.grad)
                p.grad /= world
            opt.step()
        epoch += 1
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "adapter.pt")
            print("epoch", epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
