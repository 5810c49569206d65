"""Compare methods of gradient compression: bytes, time and accuracy of the same training with each.

shoal run -n 2 examples/compression.py
srun -N 4 python examples/compression.py --epochs 10

Bytes are what the first rank's machine sent in this time, counted by its kernel. They include the bytes
of all ranks on it and of other programs.
"""

import argparse
import time

import psutil
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import shoal

WAYS = {
    "none": shoal.DDP(),
    "bf16": shoal.DDP(compression="bf16"),
    "int8": shoal.DDP(compression="int8"),
    "PowerSGD": shoal.DDP(compression=shoal.PowerSGD(rank=4)),
    "TopK": shoal.DDP(compression=shoal.TopK(ratio=0.01)),
    "auto": shoal.DDP(compression="auto"),  # prints its measurements and its choice
}


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(epochs: int) -> None:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, validation = shuffled[:1437], shuffled[1437:]
    with shoal.init(seed=0) as world:
        for name, strategy in WAYS.items():
            torch.manual_seed(0)  # each starts with the same parameters
            net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
            net.append(nn.Linear(512, 10))
            model = shoal.parallelize(net, world, strategy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            step = shoal.Step(model, optimizer, shoal.Task(loss))
            data = shoal.Loader((images[training], labels[training]), world, batch_size=64)
            sent, begun = psutil.net_io_counters().bytes_sent, time.perf_counter()
            for batch in data.epochs(epochs):
                step(batch)
            world.barrier()
            seconds = (time.perf_counter() - begun) / step.number
            megabytes = (psutil.net_io_counters().bytes_sent - sent) / step.number / 1e6
            held_out = (images[validation], labels[validation])
            result = shoal.evaluate(step, held_out, metrics={"accuracy": shoal.Accuracy()})
            world.print(
                f"{name:8} {1e3 * seconds:6.1f} ms and {megabytes:6.2f} MB a step, "
                f"accuracy {result['accuracy']:.1%}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
