"""Skip-gram embeddings with negative sampling, two loader workers."""
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, NEG = 50, 4


class SkipGramPairs(Dataset):
    def __init__(self, seed=0):
        rnd = random.Random(seed)
        text = [rnd.randrange(VOCAB) for _ in range(100)]
        self.pairs = [(text[i], text[i + d]) for i in range(98) for d in (1, 2)][:192]
        self.epoch = 0

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        center, context = self.pairs[index]
        negatives = [random.randrange(VOCAB) for _ in range(NEG)]
        return center, context, torch.tensor(negatives)


class SkipGram(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.center = nn.Embedding(VOCAB, dim)
        self.context = nn.Embedding(VOCAB, dim)

    def forward(self, c, o, neg):
        v = self.center(c)
        pos = logsigmoid((v * self.context(o)).sum(-1))
        negative = logsigmoid(-(self.context(neg) @ v.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(pos + negative).mean()


def train(epochs=3, batch=32):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    random.seed(1)
    model = nn.parallel.DistributedDataParallel(SkipGram())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-3)
    data = SkipGramPairs()
    sampler = DistributedSampler(data, shuffle=True)
    start = 0
    if os.path.exists("w2v.pt"):
        blob = torch.load("w2v.pt")
        model.load_state_dict(blob["model"])
        opt.load_state_dict(blob["opt"])
        start = blob["epoch"]
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        loader = DataLoader(data, batch // world, sampler=sampler, num_workers=2)
        for batch_ in loader:
            opt.zero_grad()
            loss = model(*batch_)
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}, "w2v.pt")
            print("epoch", epoch, "saved")
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
