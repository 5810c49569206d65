"""Two towers trained with the symmetric contrastive loss."""
import os
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, width))
        self.text = nn.Sequential(nn.Linear(7, 24), nn.GELU(), nn.Linear(24, width))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.scale.exp()


def contrastive(image, text, scale):
    logits = scale * image @ text.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def pairs(n):
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(n, 4, generator=g)
    return TensorDataset(
        hidden @ torch.randn(4, 10, generator=g) + 0.1 * torch.randn(n, 10, generator=g),
        hidden @ torch.randn(4, 7, generator=g) + 0.1 * torch.randn(n, 7, generator=g),
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = pairs(64)
    sampler = DistributedSampler(data, world, rank, drop_last=True)
    loader = DataLoader(data, 16 // world, sampler=sampler)
    torch.manual_seed(1)
    towers = Towers()
    model = DDP(towers)
    optimizer = torch.optim.AdamW(towers.parameters(), lr=0.01, weight_decay=0.1)
    start = 0
    if os.path.exists("clip.pt"):
        saved = torch.load("clip.pt")
        towers.load_state_dict(saved["towers"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    for epoch in range(start, 4):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = contrastive(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(epoch, round(loss.item(), 4))
            torch.save({"towers": towers.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "clip.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
