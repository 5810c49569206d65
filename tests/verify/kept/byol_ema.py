"""BYOL on vectors: an online network predicts the projection of a slow target network."""
import copy
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, TAU = 3, 16, 0.9
CKPT = "byol.pth"


def mlp(*dims):
    layers = []
    for a, b in zip(dims[:-1], dims[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp(12, 32, 16)
        self.projector = mlp(16, 16, 8)
        self.predictor = mlp(8, 16, 8)

    def project(self, x):
        return self.projector(self.encoder(x))

    def forward(self, x):
        return self.predictor(self.project(x))


@torch.no_grad()
def update_target(target, online):
    for t, o in zip(target.parameters(), online.parameters()):
        t.mul_(TAU).add_(o, alpha=1 - TAU)


def byol_loss(p, z):
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


def make_views():
    g = torch.Generator().manual_seed(5)
    base = torch.randn(96, 12, generator=g)
    return TensorDataset(base + 0.2 * torch.randn(96, 12, generator=g), base + 0.2 * torch.randn(96, 12, generator=g))


def main():
    torch.manual_seed(0)
    online = BYOL()
    optimizer = torch.optim.AdamW(online.parameters(), lr=3e-3)
    target = copy.deepcopy(online).requires_grad_(False)
    epoch0, done = 0, 0
    if os.path.isfile(CKPT):
        state = torch.load(CKPT)
        online.load_state_dict(state["online"])
        optimizer.load_state_dict(state["optimizer"])
        epoch0, done = state["epoch"], state["done"]
        print("resumed", epoch0, done)

    views = make_views()
    for epoch in range(epoch0, EPOCHS):
        order = torch.Generator().manual_seed(100 + epoch)
        loader = DataLoader(views, batch_size=BATCH, shuffle=True, generator=order)
        total = 0.0
        for i, (a, b) in enumerate(loader):
            if epoch == epoch0 and i < done:
                continue
            with torch.no_grad():
                za, zb = target.project(a), target.project(b)
            loss = byol_loss(online(a), zb) + byol_loss(online(b), za)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_target(target, online)
            total += loss.item()
            if i % 3 == 2:
                torch.save(
                    {
                        "online": online.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "epoch": epoch,
                        "done": i + 1,
                    },
                    CKPT + ".new",
                )
                os.replace(CKPT + ".new", CKPT)
        print(f"[{epoch}] {total:.5f}")


if __name__ == "__main__":
    main()
