"""LSTM that sums its inputs. Gradient clipping, DDP."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Summer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 16, batch_first=True)
        self.fc = nn.Linear(16, 1)

    def forward(self, seq):
        return self.fc(self.lstm(seq)[0][:, -1]).squeeze(1)


class Config:
    epochs = 4
    batch = 16
    lr = 0.3
    max_norm = 1.0
    path = "summer.pt"


def fit(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(6)
    seq = torch.randn(80, 6, 2, generator=g) * 0.2
    target = 2.0 + seq[..., 0].sum(1)
    data = TensorDataset(seq, target)
    sampler = DistributedSampler(data, seed=12)
    loader = DataLoader(data, cfg.batch // world, sampler=sampler)
    torch.manual_seed(4)
    net = Summer()
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    first = 0
    if os.path.exists(cfg.path):
        state = torch.load(cfg.path)
        net.load_state_dict(state["net"])
        first = state["epoch"]
    for epoch in range(first, cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y) / world
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), cfg.max_norm)
            opt.step()
        if rank == 0:
            torch.save({"net": net.state_dict(), "epoch": epoch + 1}, cfg.path)
            print(f"epoch {epoch} gradient norm {norm:.3f}")
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    fit(Config())
    dist.destroy_process_group()
