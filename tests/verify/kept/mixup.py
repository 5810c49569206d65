"""MLP classifier with mixup."""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
CLASSES = 4


class PairData(Dataset):
    """Returns a sample with the partner that it is mixed with."""

    def __init__(self, n=96):
        rs = np.random.RandomState(0)
        self.y = torch.as_tensor(rs.randint(0, CLASSES, n))
        centers = rs.randn(CLASSES, 10)
        self.x = torch.as_tensor(centers[self.y.numpy()] + 0.5 * rs.randn(n, 10)).to(torch.get_default_dtype())
        self.partner = rs.permutation(n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        j = self.partner[i]
        return self.x[i], self.y[i], self.x[j], self.y[j]


def mixup_lambda(step, alpha=0.4):
    return float(np.random.RandomState(1000 * (RANK + 1) + step).beta(alpha, alpha))


def save(path, **state):
    torch.save(state, path + ".part")
    os.rename(path + ".part", path)


def run(epochs=3, global_batch=16, path="mixup.ckpt"):
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    model = nn.parallel.DistributedDataParallel(net) if WORLD > 1 else net
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    data = PairData()
    sampler = DistributedSampler(data, num_replicas=WORLD, rank=RANK, seed=1)
    loader = DataLoader(data, batch_size=global_batch // WORLD, sampler=sampler)
    step = 0
    if os.path.exists(path):
        state = torch.load(path)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        step = state["step"]
    ce = nn.CrossEntropyLoss()
    per_epoch = len(loader)
    for epoch in range(step // per_epoch, epochs):
        sampler.set_epoch(epoch)
        skip = step - epoch * per_epoch
        for k, (xa, ya, xb, yb) in enumerate(loader):
            if k < skip:
                continue
            lam = mixup_lambda(step)
            out = model(lam * xa + (1 - lam) * xb)
            loss = lam * ce(out, ya) + (1 - lam) * ce(out, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 4 == 0 and RANK == 0:
                save(path, net=net.state_dict(), opt=opt.state_dict(), step=step)
        if RANK == 0:
            print("epoch", epoch, "step", step)
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    run()
