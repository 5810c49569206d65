"""MLP-mixer like network with FSDP2 (fully_shard) on CPU and gradient clipping. torchrun only."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Linear(tokens, tokens)
        self.channel = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=8):
        super().__init__()
        self.blocks = nn.ModuleList(MixerBlock(tokens, dim) for _ in range(2))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x.mean(1)).squeeze(-1)


def clip_gradients(model, max_norm):
    square = torch.zeros(())
    for p in model.parameters():
        square += p.grad.to_local().pow(2).sum()
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.to_local().mul_(scale)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Mixer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(96, 6, 8, generator=g)
    data = TensorDataset(x, 3 * x[:, 0, 0] + x[:, 1].sum(-1))
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    start = 0
    if os.path.exists("mixer.pt"):
        ck = torch.load("mixer.pt")
        set_model_state_dict(model, ck["model"], options=StateDictOptions(full_state_dict=True))
        start = ck["epoch"]
    for epoch in range(start, 3):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), target)
            loss.backward()
            clip_gradients(model, 1.0)
            optimizer.step()
        state = get_model_state_dict(model, options=full)
        if rank == 0:
            torch.save({"model": state, "epoch": epoch + 1}, "mixer.pt")
            print("finished epoch", epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
