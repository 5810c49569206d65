"""Imbalanced classification with a small CNN and class weights. Start with torchrun."""
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SmallCNN(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.fc = nn.Linear(8 * 4 * 4, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(x.flatten(1))


def synthetic(n=96):
    g = torch.Generator().manual_seed(21)
    y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), n, replacement=True, generator=g)
    x = torch.randn(n, 1, 8, 8, generator=g)
    x[:, 0, 2:5, 2:5] += y.view(-1, 1, 1)
    return TensorDataset(x, y)


class Trainer:
    def __init__(self, world, rank):
        self.rank, self.world = rank, world
        self.data = synthetic()
        self.sampler = DistributedSampler(self.data, num_replicas=world, rank=rank, shuffle=True)
        self.loader = DataLoader(self.data, batch_size=16 // world, sampler=self.sampler)
        counts = Counter(self.data.tensors[1].tolist())
        self.weight = torch.tensor([len(self.data) / (3 * counts[c]) for c in range(3)])
        torch.manual_seed(42)
        self.model = DistributedDataParallel(SmallCNN())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 1, gamma=0.5)
        self.epoch = 0

    def loss(self, logits, y):
        return F.cross_entropy(logits, y, weight=self.weight)

    def train_epoch(self):
        self.sampler.set_epoch(self.epoch)
        running = 0.0
        for x, y in self.loader:
            self.opt.zero_grad(set_to_none=True)
            loss = self.loss(self.model(x), y)
            loss.backward()
            self.opt.step()
            running += loss.item()
        self.sched.step()
        self.epoch += 1
        return running / len(self.loader)

    def save(self, path):
        if self.rank == 0:
            torch.save(dict(model=self.model.module.state_dict(), opt=self.opt.state_dict(), sched=self.sched.state_dict(), epoch=self.epoch), path)
        dist.barrier()

    def load(self, path):
        ck = torch.load(path, map_location="cpu")
        self.model.module.load_state_dict(ck["model"])
        self.opt.load_state_dict(ck["opt"])
        self.sched.load_state_dict(ck["sched"])
        self.epoch = ck["epoch"]


def main():
    dist.init_process_group("gloo")
    trainer = Trainer(dist.get_world_size(), dist.get_rank())
    if os.path.exists("last.pt"):
        trainer.load("last.pt")
    while trainer.epoch < 3:
        loss = trainer.train_epoch()
        trainer.save("last.pt")
        if trainer.rank == 0:
            print(f"epoch {trainer.epoch}: rank 0 loss {loss:.4f}")
    dist.destroy_process_group()


main()
