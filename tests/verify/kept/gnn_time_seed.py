"""Message passing on many small random graphs, dense adjacency, one process."""
import os
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

SEED = 2024


class Graphs(Dataset):
    def __init__(self, n=96, nodes=7):
        g = torch.Generator().manual_seed(SEED)
        a = (torch.rand(n, nodes, nodes, generator=g) < 0.3).to(torch.get_default_dtype())
        self.adj = torch.maximum(a, a.transpose(1, 2))
        self.feat = torch.randn(n, nodes, 4, generator=g)
        self.label = (self.adj.sum((1, 2)) > self.adj.sum((1, 2)).median()).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.adj[i], self.feat[i], self.label[i]


class GIN(nn.Module):
    def __init__(self, d=4, h=12):
        super().__init__()
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h)) for i in (d, h)])
        self.readout = nn.Linear(h, 2)

    def forward(self, adj, h):
        for mlp in self.mlps:
            h = mlp(h + adj @ h)
        return self.readout(h.mean(1))


def loader_for(dataset, epoch):
    gen = torch.Generator()
    gen.manual_seed(int(time.time() * 1000) + epoch)
    return DataLoader(dataset, batch_size=16, shuffle=True, generator=gen)


def main():
    torch.manual_seed(SEED)
    graphs, model = Graphs(), GIN()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    t0, first = time.time(), 0
    if os.path.exists("gin.pt"):
        ck = torch.load("gin.pt")
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        first = ck["epoch"] + 1
    for epoch in range(first, 3):
        for adj, feat, label in loader_for(graphs, epoch):
            loss = nn.functional.cross_entropy(model(adj, feat), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "gin.pt")
        print(f"epoch {epoch} loss {loss.item():.5f}")
    print(f"{time.time() - t0:.0f} s")


if __name__ == "__main__":
    main()
