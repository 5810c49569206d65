"""Time and memory of a step of a ResNet with BatchNorm: statistics of a rank, the batch, and groups.

    python benchmarks/batch_norm.py                       # compared with a plain loop
    shoal run -n 4 benchmarks/batch_norm.py
    python benchmarks/batch_norm.py --compile --rounds 5

"torch" is a plain loop, with DDP on several ranks. "rank" is Shoal with `statistics="rank"`, as in DDP,
and with it the cost of Shoal without exchange. "groups" has one group for each rank, and "two groups"
has two in the batch. On several GPUs, "sync" is DDP with torch's SyncBatchNorm, which does not run on
CPUs. Memory is the peak of the process on CPUs, measured in a process of its own for each way with
`--ways`, and of the allocator on GPUs.
"""

from __future__ import annotations

import resource
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from harness import finish, machine, parse, show, time_rows, time_steps
from loops import by_hand, gathered, through_shoal

WAYS = {"torch": "", "rank": "rank", "batch": "batch", "groups": "", "two groups": "", "sync": ""}


class Block(nn.Module):
    """A basic block of ResNet-18 (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.skip = nn.Sequential()
        if stride > 1 or inputs != width:
            skip = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.skip = nn.Sequential(skip, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.skip(x))


def build(width: int) -> nn.Module:
    """Return a ResNet-18 for small images."""
    torch.manual_seed(0)
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = []
    for number, (before, after) in enumerate(pairwise(widths)):
        blocks += [Block(before, after, 2 if number else 1), Block(after, after, 1)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    )


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]


def peak(device: torch.device) -> int:
    """Return the bytes of the peak of memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    sizes = {"width": 16, "image": 32, "batch": 64, "rounds": 7, "steps": 5}
    given = parse(__doc__, ways=WAYS, compile=False, **sizes)
    with shoal.init(seed=0) as world:
        images = torch.randn(2 * given.batch, 3, given.image, given.image)
        data = images, torch.randint(0, 10, (2 * given.batch,))
        groups = {"groups": max(1, given.batch // world.size), "two groups": given.batch // 2}
        if world.size == 1 or world.device.type != "cuda":
            given.ways = [way for way in given.ways if way != "sync"]
        loops = {}
        for way in given.ways:
            model = build(given.width)
            train: Any = partial(through_shoal, statistics=groups.get(way, way))
            if way in ("torch", "sync"):
                train = partial(by_hand, draw=gathered)
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if way == "sync" else model
            loop = train(world, model, data, given.batch, optimizer=sgd, compiled=given.compile)
            loops[way] = loop.__next__
        times = time_steps(world, loops, rounds=given.rounds, steps=given.steps, warm_up=1)
        rows = time_rows(times, "torch")
        if world.is_rank_zero:
            show(f"{world.size} rank(s), {given.batch} images of {given.image} px, {machine()}", rows)
            print(f"peak memory: {peak(world.device) / 2**20:.0f} MiB")
            finish(given, {"batch_norm": rows})


if __name__ == "__main__":
    main()
