"""1D dilated convolutions for next-value prediction, Adam, gradients averaged by hand."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class TCN(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 1)
        self.convs = nn.ModuleList(nn.Conv1d(ch, ch, 2, dilation=2**i) for i in range(3))
        self.out = nn.Conv1d(ch, 1, 1)

    def forward(self, x):
        h = self.inp(x)
        for conv in self.convs:
            pad = conv.dilation[0]
            h = h + torch.tanh(conv(nn.functional.pad(h, (pad, 0))))
        return self.out(h)


def sync_gradients(model):
    if WORLD == 1:
        return
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def waves():
    g = torch.Generator().manual_seed(2)
    t = torch.arange(17).to(torch.get_default_dtype())
    return torch.sin(t * (0.2 + torch.rand(96, 1, generator=g)) + 6 * torch.rand(96, 1, generator=g)).unsqueeze(1)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TCN()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = TensorDataset(waves())
    sampler = DistributedSampler(data, WORLD, RANK)
    loader = DataLoader(data, batch_size=16 // WORLD, sampler=sampler)
    start = 0
    if os.path.exists("tcn.pt"):
        saved = torch.load("tcn.pt")
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        start = saved["epoch"]
    for epoch in range(start, 3):
        sampler.set_epoch(epoch)
        for (wave,) in loader:
            loss = nn.functional.mse_loss(model(wave[..., :-1]), wave[..., 1:])
            opt.zero_grad()
            loss.backward()
            sync_gradients(model)
            opt.step()
        if RANK == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}, "tcn.tmp")
            os.replace("tcn.tmp", "tcn.pt")
            print("epoch", epoch)
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
