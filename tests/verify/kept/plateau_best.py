"""Highway MLP on noise, to measure overfitting; halves the learning rate when the validation loss is no new best. One process."""
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Highway(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.h, self.t = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        gate = torch.sigmoid(self.t(x))
        return gate * torch.tanh(self.h(x)) + (1 - gate) * x


class BestTracker:
    """Remembers the best validation loss, decays the learning rate of the optimizer after a worse one."""

    def __init__(self, optimizer, factor=0.5):
        self.optimizer, self.factor, self.best = optimizer, factor, float("inf")

    def update(self, value):
        if value < self.best:
            self.best = value
            return True
        for group in self.optimizer.param_groups:
            group["lr"] *= self.factor
        return False


def toy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    return x, torch.randn(n, 1, generator=g)


def main():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), Highway(16), Highway(16), nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9)
    tracker = BestTracker(opt)
    (x, y), (vx, vy) = toy(64, 1), toy(32, 2)
    step = 0
    if os.path.exists("reg.pth"):
        ck = torch.load("reg.pth")
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        step = ck["step"]
    while step < 20:
        epoch = step // 4
        for xb, yb in DataLoader(TensorDataset(x, y), 16, shuffle=True, generator=torch.Generator().manual_seed(epoch)):
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        with torch.no_grad():
            val = nn.functional.mse_loss(model(vx), vy).item()
        improved = tracker.update(val)
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, "reg.pth")
        print(f"epoch {epoch} val {val:.4f} lr {opt.param_groups[0]['lr']:.4f}", "*" if improved else "")


if __name__ == "__main__":
    main()
