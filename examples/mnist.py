"""MNIST: a dense network, from IDX files in a directory, on any number of processes.

python examples/mnist_standin.py    # if you have no MNIST: 70,000 printed digits
python examples/mnist.py
shoal run -n 2 examples/mnist.py -- --run runs/mnist-2
python examples/mnist.py --data /path/to/MNIST/raw --run runs/mnist-real

Without --data the files are read from $DSDIR/MNIST/raw, where torchvision keeps them and computing
centres often have them, or from the directory of mnist_standin.py. The model uses float64, so that any
number of processes shows the same digits: in float32, rounding alone moves the test loss by a tenth
over 2,000 steps.
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


def read_idx(path: Path) -> Tensor:
    """Return the bytes of an IDX file, compressed or not, in the shape given by its header."""
    if path.exists():
        data = path.read_bytes()
    else:
        data = gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    dimensions = data[3]
    shape = np.frombuffer(data, ">u4", dimensions, offset=4).tolist()
    return torch.tensor(np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)).reshape(shape)


def read(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    images = read_idx(directory / f"{part}-images-idx3-ubyte")
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte")
    return images, labels.long()


def inputs(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[0] / 255  # images stay bytes until they are used


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(data: Path, directory: str, epochs: int, batch_size: int, rate: float) -> None:
    if not any(data.glob("train-images*")):
        raise SystemExit(
            f"no MNIST in {data}; for a substitute: python examples/mnist_standin.py {data}"
        )
    torch.set_default_dtype(torch.float64)
    training, test = read(data, "train"), read(data, "t10k")
    with shoal.init(seed=0) as world:
        net = nn.Sequential(
            *(nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU()),
            *(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
        model = shoal.parallelize(net, world)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        step = shoal.Step(model, optimizer, shoal.Task(loss, inputs))
        loader = shoal.Loader(training, world, batch_size=batch_size)
        with shoal.Run(directory, step, loader) as run:
            run.restore()
            for batch in loader.epochs(epochs):
                step(batch)
                run.tick(every=200)
            run.save()
        result = shoal.evaluate(step, test, metrics={"accuracy": shoal.Accuracy()})
        world.print(
            f"test loss {result['loss']:.4f}, accuracy {result['accuracy']:.2%} "
            f"of {result['samples']:,} images"
        )


if __name__ == "__main__":
    centre = os.environ.get("DSDIR")
    usual = Path(centre, "MNIST/raw") if centre else Path("runs/mnist-data")
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=usual)
    parser.add_argument("--run", default="runs/mnist")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.05)
    options = parser.parse_args()
    main(options.data, options.run, options.epochs, options.batch_size, options.rate)
