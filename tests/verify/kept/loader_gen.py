"""Regression on one process, with a checkpoint after each epoch."""
from pathlib import Path
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

STATE = Path("last.ckpt")


def build():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(60, 6)
    data = TensorDataset(x, x[:, :1] * x[:, 1:2])
    shuffle = torch.Generator().manual_seed(11)
    return net, optimizer, DataLoader(data, 10, shuffle=True, generator=shuffle), shuffle


def save(epoch, net, optimizer, shuffle):
    torch.save({"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, STATE)


def load(net, optimizer, shuffle):
    if not STATE.exists():
        return 0
    state = torch.load(STATE)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def main():
    net, optimizer, loader, shuffle = build()
    for epoch in range(load(net, optimizer, shuffle), 5):
        total = 0.0
        for x, y in loader:
            loss = ((net(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total / len(loader))
        save(epoch, net, optimizer, shuffle)


if __name__ == "__main__":
    main()
