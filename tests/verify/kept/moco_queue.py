"""MoCo on vectors: momentum encoder and a queue of negative keys. One process."""
import copy
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class MoCo(nn.Module):
    def __init__(self, dim=8, queue=48, m=0.95, t=0.2):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, dim))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.m, self.t, self.size = m, t, queue
        self.register_buffer("queue", F.normalize(torch.randn(queue, dim), dim=1), persistent=False)
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for k, q in zip(self.k.parameters(), self.q.parameters()):
            k.lerp_(q, 1 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        p = int(self.ptr)
        self.queue[p : p + len(keys)] = keys
        self.ptr.fill_((p + len(keys)) % self.size)

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = F.normalize(self.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / self.t
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def save_checkpoint(step, model, opt, path="moco.pt"):
    torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, path)


def load_checkpoint(model, opt, path="moco.pt"):
    if not os.path.exists(path):
        return 0
    ck = torch.load(path)
    model.load_state_dict(ck["model"])
    opt.load_state_dict(ck["opt"])
    return ck["step"]


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(96, 10, generator=g)
    views = TensorDataset(x + 0.1 * torch.randn(96, 10, generator=g), x + 0.1 * torch.randn(96, 10, generator=g))
    model = MoCo()
    opt = torch.optim.SGD(model.q.parameters(), lr=0.1, momentum=0.9)
    step = load_checkpoint(model, opt)
    while step < 18:
        epoch, skip = divmod(step, 6)
        batches = DataLoader(views, 16, shuffle=True, generator=torch.Generator().manual_seed(50 + epoch))
        for i, (a, b) in enumerate(batches):
            if i >= skip:
                loss = model(a, b)
                opt.zero_grad()
                loss.backward()
                opt.step()
                step += 1
                if step % 4 == 0:
                    save_checkpoint(step, model, opt)
        print(f"epoch {epoch} loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
