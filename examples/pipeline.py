"""A deep network in pipeline stages: idle times of the ranks, and the same losses with every schedule.

python examples/pipeline.py
shoal run -n 2 examples/pipeline.py
shoal run -n 2 examples/pipeline.py -- --schedule zbv --draw runs/zbv.svg
shoal run -n 4 examples/pipeline.py -- --layout replicate=2,pipeline=2 --schedule interleaved

A residual network classifies the points of two spirals. Before training it prints the order of work on
each rank: `2F5` is the forward of micro-batch 5 through stage 2.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, points: Tensor) -> Tensor:
        added: Tensor = self.narrow(F.gelu(self.wide(self.norm(points))))
        return points + added


class Spirals(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        points = self.first(points)
        for block in self.blocks:
            points = block(points)
        scores: Tensor = self.head(points)
        return scores


def spirals(points: int) -> tuple[Tensor, Tensor]:
    """Return points of two spirals with a little noise, and the spiral of each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(points) % 2
    turn = 3 * math.pi * torch.rand(points, generator=generator).sqrt()
    angle = turn + math.pi * labels
    place = torch.stack((angle.cos(), angle.sin()), 1) * turn[:, None] / (3 * math.pi)
    return place + 0.01 * torch.randn(points, 2, generator=generator), labels


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(options: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)  # the model is small; differences are then rounding only
    data, micro_batches = spirals(2000), 8
    with shoal.init(layout=options.layout, seed=0) as world:
        ranks = world.layout.degree("pipeline")
        rows = 200 // world.data_size // micro_batches
        pipeline = shoal.Pipeline(example_args=(data[0][:rows],), schedule=options.schedule)
        if ranks > 1:
            plan = pipeline.timetable(ranks, micro_batches)
            world.print(plan)
            if options.draw and world.is_rank_zero:
                plan.draw(options.draw)
        model = shoal.parallelize(Spirals(options.blocks, 16), world, pipeline)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        loader = shoal.Loader(data, world, batch_size=200, micro_batches=micro_batches)
        with shoal.Run(options.run, step, loader) as run:
            run.restore()
            for batch in loader.epochs(options.epochs):
                step(batch)
                run.tick(every=50)
            run.save()
        result = shoal.evaluate(step, data, metrics={"accuracy": shoal.Accuracy()})
        world.print(f"loss {result['loss']:.6f}, accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/pipeline")
    parser.add_argument("--layout", default="pipeline=-1")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--draw", help="file for a picture of the schedule, such as runs/1f1b.svg")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args())
