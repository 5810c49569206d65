"""Fine-tunes a small residual CNN whose BatchNorm statistics stay frozen, as in detection code bases."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch)
        self.conv2, self.bn2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(ResBlock(8), ResBlock(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def freeze_bn(module):
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 3, 6, 6, generator=g) + y.view(-1, 1, 1, 1) * 0.3
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(hits)
    model.train()
    return hits[0] / hits[1]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = images(96, 1), images(30, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16 // world, sampler=sampler)
    val_loader = DataLoader(Subset(val, list(range(len(val)))[rank::world]), 8)
    net = Net()
    model = DDP(net)
    freeze_bn(model.train())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    epoch = 0
    if os.path.exists("ckpt.pt"):
        ck = torch.load("ckpt.pt")
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        epoch = ck["epoch"]
    while epoch < 3:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(net, val_loader)
        epoch += 1
        if rank == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "ckpt.pt")
            print(f"epoch {epoch} accuracy {acc:.4f}")
        dist.barrier()


if __name__ == "__main__":
    main()
