"""Workers that change the same parameters without waiting for each other, one of them slow.

python examples/hogwild.py
shoal run -n 3 examples/hogwild.py
shoal run -n 3 examples/hogwild.py -- --staleness 4

Points are told apart by a small network. The last worker sleeps in each step, as one on a busy core
would; the others don't wait for it, unless a bound says so. Kill a worker: the others continue.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.strategies import engine_of
from shoal.strategies.asynchronous.hogwild import HogwildEngine


def data(samples: int) -> tuple[Tensor, Tensor]:
    """Points, and in which of ten random directions each lies furthest."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(samples, 16, generator=generator)
    return points, (points @ torch.randn(16, 10, generator=generator)).argmax(1)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(options: argparse.Namespace) -> None:
    with shoal.init(seed=0) as world:
        net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
        model = shoal.parallelize(net, world, shoal.Hogwild(max_staleness=options.staleness))
        # Each worker steps on its share of a batch: the rate is one for batches of that size.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        samples = data(options.samples)
        loader = shoal.Loader(samples, world, batch_size=16 * world.size)
        slow = options.slow if world.size > 1 and world.rank == world.size - 1 else 0.0
        with shoal.Run(options.run, step, loader) as run:
            run.restore()
            begun = time.perf_counter()
            for batch in loader.epochs(options.epochs):
                step(batch)
                time.sleep(slow)
                run.tick()
            seconds = time.perf_counter() - begun
            run.save()  # all meet here, and agree on the parameters
        result = shoal.evaluate(step, samples, metrics={"accuracy": shoal.Accuracy()})
        engine = engine_of(model)
        if isinstance(engine, HogwildEngine):
            few = {n: times for n, times in sorted(engine.staleness.items()) if n < 10}
            more = sum(engine.staleness.values()) - sum(few.values())
            behind = f"its updates were so many behind: {few}, and {more} more than 9"
            print(f"worker {world.rank}: {seconds:.1f} s; {behind}")
        world.print(f"accuracy {result['accuracy']:.1%} of {result['samples']:,} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/hogwild")
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--staleness", type=int, help="steps a worker may be ahead of the slowest")
    parser.add_argument("--slow", type=float, default=0.01, help="seconds that the last one sleeps")
    main(parser.parse_args())
