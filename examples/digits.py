"""Scanned digits: a small convolutional network, a custom training loop, any number of processes.

python examples/digits.py
shoal run -n 3 examples/digits.py -- --run runs/digits --epochs 20
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import shoal


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(directory: str, epochs: int) -> None:
    torch.set_default_dtype(torch.float64)  # the model is small; differences are then rounding only
    digits = load_digits()
    images = torch.tensor(digits.images)[:, None] / 16
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, validation = shuffled[:1437], shuffled[1437:]

    with shoal.init(seed=0) as world:
        net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
        )
        model = shoal.parallelize(net, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        data = shoal.Loader((images[training], labels[training]), world, batch_size=64)
        with shoal.Run(directory, step, data) as run:
            run.restore()
            for batch in data.epochs(epochs):
                step(batch)
                run.tick(every=20)
            run.save()
        held_out = (images[validation], labels[validation])
        result = shoal.evaluate(step, held_out, metrics={"accuracy": shoal.Accuracy()})
        world.print(
            f"validation accuracy {result['accuracy']:.1%}, "
            f"{result['samples']} of {len(validation)} samples"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    main(options.run, options.epochs)
