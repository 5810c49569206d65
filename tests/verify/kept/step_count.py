"""Convolutional autoencoder, one process, checkpoint every four steps."""
import os
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(0)
        self.images = torch.zeros(n, 1, 8, 8)
        corners = torch.randint(0, 5, (n, 2), generator=g)
        for img, (r, c) in zip(self.images, corners.tolist()):
            img[0, r : r + 3, c : c + 3] = 1.0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class ConvAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 1, 4, 2, 1))

    def forward(self, x):
        return self.up(self.down(x))


class Trainer:
    path = "ae_state.pt"

    def __init__(self):
        torch.manual_seed(17)
        self.model = ConvAE()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.95)
        self.step, self.data = 0, Shapes()

    def save(self):
        torch.save({k: getattr(self, k).state_dict() for k in ("model", "opt", "sched")} | {"step": self.step}, self.path)

    def restore(self):
        if os.path.exists(self.path):
            state = torch.load(self.path)
            for k in ("model", "opt", "sched"):
                getattr(self, k).load_state_dict(state[k])
            self.step = state["step"]

    def batches(self, epoch, skip):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch)).tolist()
        return DataLoader(self.data, batch_size=16, sampler=order[skip * 16 :])

    def train_step(self, x):
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(x), x)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        if (self.step + 1) % 4 == 0:
            self.save()
        self.step += 1
        return loss.item()

    def run(self, epochs=3):
        self.restore()
        while self.step < epochs * 6:
            epoch, skip = divmod(self.step, 6)
            for x in self.batches(epoch, skip):
                loss = self.train_step(x)
            print(f"epoch {epoch}: {loss:.5f}")


if __name__ == "__main__":
    Trainer().run()
