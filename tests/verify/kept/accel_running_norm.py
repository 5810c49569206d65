"""Value regression with running normalisation of the targets, with Accelerate."""
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class RunningNorm:
    """Mean and variance of all targets so far."""

    def __init__(self):
        self.count, self.mean, self.m2 = 0, 0.0, 0.0

    def update(self, values):
        for v in values.tolist():
            self.count += 1
            delta = v - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (v - self.mean)

    def __call__(self, values):
        return (values - self.mean) / (self.m2 / self.count + 1e-4) ** 0.5

    def state_dict(self):
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state):
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    x = torch.randn(96, 8)
    y = 5 + 3 * x[:, :3].sum(1) + torch.linspace(0, 4, 96)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norm, progress = RunningNorm(), Progress()
    accelerator.register_for_checkpointing(progress)
    if os.path.isdir("state"):
        accelerator.load_state("state")
    while progress.epoch < 3:
        for inputs, values in loader:
            norm.update(values)
            pred = model(inputs).squeeze(-1)
            loss = nn.functional.smooth_l1_loss(pred, norm(values))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        progress.epoch += 1
        accelerator.save_state("state")
        accelerator.print(f"epoch {progress.epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
