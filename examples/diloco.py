"""Ranks that rarely communicate: DiLoCo compared with LocalSGD and DDP, on scanned digits.

shoal run -n 2 examples/diloco.py
shoal run -n 4 examples/diloco.py -- --way LocalSGD --every 8 --run runs/local
shoal report runs/diloco

Run it again to resume, on any number of ranks. The report shows the bytes sent over the network.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import shoal


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(options: argparse.Namespace) -> None:
    ways: dict[str, shoal.DDP | shoal.LocalSGD | shoal.DiLoCo] = {
        "DDP": shoal.DDP(),
        "LocalSGD": shoal.LocalSGD(sync_every=options.every),
        "DiLoCo": shoal.DiLoCo(sync_every=options.every),
    }
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, validation = shuffled[:1437], shuffled[1437:]
    with shoal.init(seed=0) as world:
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        model = shoal.parallelize(net, world, ways[options.way])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = shoal.Step(model, optimizer, shoal.Task(loss))
        data = shoal.Loader((images[training], labels[training]), world, batch_size=64)
        with shoal.Run(options.run, step, data) as run:
            run.restore()
            for batch in data.epochs(options.epochs):
                step(batch)
                run.tick(every=100)
            run.save()  # this also averages: from here on all ranks hold the same parameters
        held_out = (images[validation], labels[validation])
        result = shoal.evaluate(step, held_out, metrics={"accuracy": shoal.Accuracy()})
        meetings = step.number // (1 if options.way == "DDP" else options.every)
        world.print(
            f"{options.way}: {step.number} steps, averaged {meetings} times, "
            f"accuracy {result['accuracy']:.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("DDP", "LocalSGD", "DiLoCo"), default="DiLoCo")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run", default="runs/diloco")
    main(parser.parse_args())
