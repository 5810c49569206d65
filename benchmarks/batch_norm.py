"""Time and memory of a step of a ResNet with BatchNorm: statistics of a rank, the batch, and groups.

python benchmarks/batch_norm.py                       # compared with a plain loop
shoal run -n 4 benchmarks/batch_norm.py
python benchmarks/batch_norm.py --compile --rounds 5

"torch" is a plain loop, with DDP on several ranks; ratios are relative to it, within rounds.
"rank" is Shoal with `statistics="rank"`, as in DDP, and with it the cost of Shoal without exchange.
"groups" has one group for each rank, and "two groups" has two in the batch. On several GPUs, "sync" is
DDP with torch's SyncBatchNorm, which does not run on CPUs. Rounds of steps alternate, so that clocks
and heat drift for all. Memory is the peak of the process on CPUs, measured in a process of its own for
each way with `--only`, and of the allocator on GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from spread import quartiles, time_steps


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


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the losses and their number."""
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def in_torch(
    given: argparse.Namespace, world: shoal.World, data: tuple[Tensor, Tensor], *, sync: bool = False
) -> Callable[[], None]:
    """Return a step of a plain loop, with DDP on several ranks."""
    model: Any = build(given.width).to(world.device)
    if world.size > 1:
        model = DistributedDataParallel(
            nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = torch.compile(model) if given.compile else model
    batches = cycle(
        [
            tuple(each.tensor_split(world.size)[world.rank].to(world.device) for each in pair)
            for pair in _pairs(data, given.batch)
        ]
    )

    def step() -> None:
        images, labels = next(batches)
        F.cross_entropy(call(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _pairs(data: tuple[Tensor, Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(data[0].split(size), data[1].split(size), strict=True)


def in_shoal(
    given: argparse.Namespace, world: shoal.World, data: tuple[Tensor, Tensor], statistics: int | str
) -> Callable[[], None]:
    """Return a step through Shoal."""
    model = shoal.parallelize(build(given.width), world, statistics=statistics)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiler = "inductor" if given.compile else None
    step = shoal.Step(model, optimizer, shoal.Task(loss), compile=compiler)
    batches = shoal.Loader(data, world, batch_size=given.batch).epochs(1_000_000)
    return lambda: step(next(batches)) and None


def main() -> None:
    """Print a table of the times of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64, help="samples over all ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", help="measure one way, for its memory")
    given = parser.parse_args()
    with shoal.init(seed=0) as world:
        images = torch.randn(2 * given.batch, 3, given.image, given.image)
        data = images, torch.randint(0, 10, (2 * given.batch,))
        makes: dict[str, Callable[[], Callable[[], None]]] = {
            "torch": lambda: in_torch(given, world, data),
            "rank": lambda: in_shoal(given, world, data, "rank"),
            "batch": lambda: in_shoal(given, world, data, "batch"),
            "groups": lambda: in_shoal(given, world, data, max(1, given.batch // world.size)),
            "two groups": lambda: in_shoal(given, world, data, given.batch // 2),
        }
        if world.size > 1 and world.device.type == "cuda":
            makes["sync"] = lambda: in_torch(given, world, data, sync=True)
        ways = {name: make() for name, make in makes.items() if given.only in (None, name)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        memory: dict[str, int] = {}
        for step in ways.values():
            step()  # which compiles
        for _ in range(given.rounds):
            for name, step in ways.items():
                seconds, memory[name] = time_steps(step, given.steps, world)
                times[name].append(seconds)
        world.print(f"{world.size} rank(s), {given.batch} images of {given.image} px, {world.device}")
        for name, found in times.items():
            ratio = ""
            if "torch" in times:
                pairs = zip(found, times["torch"], strict=True)
                ratio = f", {quartiles([ours / theirs for ours, theirs in pairs])} of torch"
            each = quartiles([1e3 * value for value in found])
            world.print(f"{name:10s} {each} ms{ratio}, {memory[name] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
