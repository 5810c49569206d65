"""Knowledge distillation between two MLPs. Ranks get strided shards, so that the last batch is uneven."""
import os
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class StridedSampler(Sampler):
    """A shuffled shard for each rank, without padding."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(77 + self.epoch)
        return iter(torch.randperm(self.n, generator=g)[self.rank :: self.world].tolist())

    def __len__(self):
        return len(range(self.rank, self.n, self.world))


def net(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    teacher = net(64).requires_grad_(False).eval()
    student = net(16)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    inputs = torch.randn(85, 10, generator=torch.Generator().manual_seed(3)) * 3
    sampler = StridedSampler(len(inputs), rank, world)
    loader = DataLoader(TensorDataset(inputs), batch_size=16 // world, sampler=sampler)
    start, temperature = 0, 2.0
    if os.path.exists("student.pt"):
        ck = torch.load("student.pt")
        student.load_state_dict(ck["student"])
        optimizer.load_state_dict(ck["optimizer"])
        start = ck["epoch"]
    for epoch in range(start, 3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(x) / temperature, -1)
            log_p = F.log_softmax(model(x) / temperature, -1)
            kl = F.kl_div(log_p, soft, reduction="batchmean")
            loss = kl * temperature**2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save({"student": student.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "student.pt")
            print(f"{epoch=}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
