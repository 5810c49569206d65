"""A network split over two devices of one process, and replicas of it.

python examples/placed.py
shoal run -n 2 examples/placed.py -- --run runs/placed-2    # each process has two devices
python examples/placed.py --balance --run runs/placed-balanced

It uses two GPUs per process if there are several, the CPU and the GPU if there is one, and the CPU
twice if there is none. The forward below does not depend on it, and the losses are the same.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

BLOCKS, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.narrow(F.gelu(self.wide(self.norm(x))))
        return x + added


class Rings(nn.Module):
    """Classifies points by the ring that they are on, of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden)
        return scores


def rings(points: int) -> tuple[Tensor, Tensor]:
    """Return points on four rings with a little noise, and the ring of each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(points) % 4
    angle = 2 * math.pi * torch.rand(points, generator=generator)
    place = torch.stack((angle.cos(), angle.sin()), 1) * (1 + labels)[:, None] / 4
    return place + 0.02 * torch.randn(points, 2, generator=generator), labels


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(options: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)  # the model is small; differences are then rounding only
    one_gpu = torch.cuda.device_count() == 1
    devices = ("cpu", "cuda:0") if one_gpu else (0, 1)
    half = {f"blocks.{n}": devices[2 * n // BLOCKS] for n in range(BLOCKS)}
    by_map = {"first": devices[0], **half, "head": devices[1]}
    with shoal.init(devices_per_rank=1 if one_gpu else 2, seed=0) as world:
        placed = shoal.DevicePlacement(devices if options.balance else by_map)
        model = shoal.parallelize(Rings(), world, [placed, shoal.DDP()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        loader = shoal.Loader(rings(2000), world, batch_size=200, micro_batches=4)
        with shoal.Run(options.run, step, loader) as run:
            run.restore()
            for batch in loader.epochs(options.epochs):
                step(batch)
                run.tick(every=50)
            run.save()
        result = shoal.evaluate(step, rings(2000), metrics={"accuracy": shoal.Accuracy()})
        world.print(f"loss {result['loss']:.6f}, accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/placed")
    parser.add_argument("--balance", action="store_true", help="split by memory, instead of by a map")
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args())
