"""Bidirectional GRU tagger, validated after each epoch on all ranks."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tagger(nn.Module):
    def __init__(self, vocab=30, tags=5, dim=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 30, (n, 9), generator=g)
    return TensorDataset(x, (x + x.roll(1, 1)) % 5)


def build_loaders(rank, world):
    train, valid = make_split(96, 1), make_split(37, 2)
    train_sampler = DistributedSampler(train, world, rank, shuffle=True)
    train_loader = DataLoader(train, batch_size=16 // world, sampler=train_sampler)
    valid_loader = DataLoader(valid, batch_size=8, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    return train_loader, train_sampler, valid_loader


@torch.no_grad()
def validate(model, loader):
    model.eval()
    stats = torch.zeros(3)
    for x, y in loader:
        logits = model(x)
        stats[0] += F.cross_entropy(logits.transpose(1, 2), y, reduction="sum")
        stats[1] += (logits.argmax(-1) == y).sum()
        stats[2] += y.numel()
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_loader, train_sampler, valid_loader = build_loaders(rank, world)
    torch.manual_seed(0)
    net = Tagger()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = 0
    if os.path.exists("tagger.pt"):
        saved = torch.load("tagger.pt")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, 3):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x).transpose(1, 2), y).backward()
            optimizer.step()
        loss, acc = validate(net, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: val loss {loss:.6f} accuracy {acc:.6f}")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "tagger.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
