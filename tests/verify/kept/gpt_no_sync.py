"""Character-level GPT with gradient accumulation, DDP."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class CharDataset(Dataset):
    def __init__(self, n, block, vocab):
        g = torch.Generator().manual_seed(11)
        self.data = torch.randint(0, vocab, (n, block + 1), generator=g)
        self.data[:, 1::2] = (self.data[:, 0::2][:, : self.data[:, 1::2].size(1)] * 3 + 1) % vocab

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i, :-1], self.data[i, 1:]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block, dim=16, heads=2, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for blk in self.blocks:
            x = blk(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--micro-batch", type=int, default=8, help="samples per micro-batch, over all ranks")
    ap.add_argument("--grad-accum", type=int, default=2)
    ap.add_argument("--ckpt", default="ckpt.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)

    data = CharDataset(96, 12, 20)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=args.micro_batch // world, sampler=sampler)
    model = DDP(GPT(20, 12))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start_epoch = start_it = 0
    if os.path.exists(args.ckpt):
        ck = torch.load(args.ckpt)
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        start_epoch, start_it = ck["epoch"], ck["it"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for it, (x, y) in enumerate(loader):
            if epoch == start_epoch and it < start_it:
                continue
            last = it % args.grad_accum == args.grad_accum - 1
            with model.no_sync() if last else contextlib.nullcontext():
                loss = model(x, y) / args.grad_accum
                loss.backward()
            if not last:
                continue
            opt.step()
            opt.zero_grad()
            if (it + 1) % (2 * args.grad_accum) == 0:
                if rank == 0:
                    torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch, "it": it + 1}, args.ckpt + ".tmp")
                    os.replace(args.ckpt + ".tmp", args.ckpt)
                dist.barrier()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
