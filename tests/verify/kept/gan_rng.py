"""A GAN on a ring of Gaussians. One process."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

LATENT = 4


def make_net(i, o):
    return nn.Sequential(nn.Linear(i, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, o))


def ring(n=96):
    angle = torch.arange(n) % 8 * (2 * torch.pi / 8)
    pts = torch.stack([angle.cos(), angle.sin()], 1)
    return pts + 0.05 * torch.randn(n, 2, generator=torch.Generator().manual_seed(0))


def main():
    torch.manual_seed(99)
    gen, disc = make_net(LATENT, 2), make_net(2, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.9))
    parts = {"gen": gen, "disc": disc, "opt_g": opt_g, "opt_d": opt_d}
    data = TensorDataset(ring())
    epoch = 0
    if os.path.exists("gan.pt"):
        ck = torch.load("gan.pt")
        for name, part in parts.items():
            part.load_state_dict(ck[name])
        epoch = ck["epoch"]
    while epoch < 3:
        loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for (real,) in loader:
            fake = gen(torch.randn(len(real), LATENT))
            d_loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            g_loss = F.softplus(-disc(fake)).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
        epoch += 1
        state = {name: part.state_dict() for name, part in parts.items()}
        state.update(epoch=epoch)
        torch.save(state, "gan.pt")
        print(f"epoch {epoch} D {d_loss.item():.5f} G {g_loss.item():.5f}")


if __name__ == "__main__":
    main()
