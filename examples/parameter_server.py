"""A parameter server: rank 0 keeps the parameters, and workers on any machine pull and push.

shoal run -n 3 examples/parameter_server.py
srun -N 4 --kill-on-bad-exit=0 python examples/parameter_server.py

The same as `examples/hogwild.py`, except for the place of the parameters. On several machines Shoal
would choose it without `server=True`. Rank 0 trains too. A worker sends the change that its own
optimizer made; with Adam, each worker has its own optimizer state.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


def data(samples: int) -> tuple[Tensor, Tensor]:
    """Return noisy waves of eight frequencies, and the frequency of each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 8
    phase = torch.rand(samples, 1, generator=generator) * 6.28
    waves = (torch.linspace(0, 6.28, 64) * (labels[:, None] + 1) + phase).sin()
    return waves + 0.3 * torch.randn(samples, 64, generator=generator), labels


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(options: argparse.Namespace) -> None:
    trained = shoal.train(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)),
        shoal.Task(loss),
        data(options.samples),
        directory=options.run,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        strategy=shoal.Hogwild(server=True, max_staleness=options.staleness),
        batch_size=64,
        epochs=options.epochs,
        validation=shoal.Validation(dataset=data(800), metrics={"accuracy": shoal.Accuracy()}),
    )
    trained.step.engine.world.print(f"accuracy {trained.metrics['accuracy']:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/parameter_server")
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--staleness", type=int, default=8, help="steps that a worker may be ahead")
    main(parser.parse_args())
