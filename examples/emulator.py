"""A surrogate of a 2-D flow: a network learns the time step of a spectral solver with shoal.train.

python examples/emulator.py
shoal run -n 2 examples/emulator.py -- --run runs/emulator-2
python examples/emulator.py --run runs/fine --size 128 --flows 200

The vorticity of a decaying flow in a periodic box (Navier-Stokes, pseudo-spectral) is given at `--size`
x `--size` points, and the network predicts it a quarter of a unit of time ahead. Afterwards picture.png
in the run directory shows truth, prediction and error one and four steps ahead, for a flow from the
validation set.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import shoal

VISCOSITY = 2e-3
SNAPSHOTS = 20  # of each flow, a quarter of a unit of time apart


def solve(flows: int, size: int) -> NDArray[np.float32]:
    """Return the vorticity w, shape (flows, SNAPSHOTS, size, size).

    It solves dw/dt + (u, v) grad w = VISCOSITY lap w.
    """
    kx = np.fft.fftfreq(size, 1 / size)[:, None]
    ky = np.fft.rfftfreq(size, 1 / size)[None]
    squared = kx**2 + ky**2
    inverse = 1 / np.where(squared == 0, np.inf, squared)
    kept = (np.abs(kx) < size / 3) & (ky < size / 3)  # the 2/3 rule against aliasing
    step = 2 / size

    def to_space(spectrum: NDArray[Any]) -> NDArray[Any]:
        field: NDArray[Any] = np.fft.irfft2(spectrum, s=(size, size))
        return field

    def rate(w: NDArray[Any]) -> NDArray[Any]:
        u, v = to_space(1j * ky * inverse * w), to_space(-1j * kx * inverse * w)
        carried = np.fft.rfft2(u * to_space(1j * kx * w) + v * to_space(1j * ky * w))
        change: NDArray[Any] = -VISCOSITY * squared * w - kept * carried
        return change

    noise = np.random.default_rng(0).standard_normal((flows, size, size))
    w = np.fft.rfft2(noise) * (squared > 0) * np.exp(-squared / 18)
    w *= 1.5 / to_space(w).std(axis=(1, 2), keepdims=True)
    snapshots = [to_space(w)]
    while len(snapshots) < SNAPSHOTS:
        for _ in range(size // 8):  # the classical Runge-Kutta method
            a = rate(w)
            b = rate(w + step / 2 * a)
            c = rate(w + step / 2 * b)
            w = w + step / 6 * (a + 2 * b + 2 * c + rate(w + step * c))
        snapshots.append(to_space(w))
    return np.stack(snapshots, axis=1).astype(np.float32)


class Emulator(nn.Module):
    """Adds to a field the output of convolutions on its torus; dilation gives them a wide range."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding_mode="circular")
        layers: list[nn.Module] = [conv(1, width, padding=1)]
        for far in (1, 2, 4, 2, 1):
            layers += [nn.GELU(), conv(width, width, padding=far, dilation=far)]
        layers += [nn.GELU(), conv(width, 1, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, field: Tensor) -> Tensor:
        change: Tensor = self.layers(field[:, None])[:, 0]
        return field + change


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), output.numel()


def relative_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    errors = (output - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
    return errors.sum(), len(errors)


def pairs(flows: Tensor) -> tuple[Tensor, Tensor]:
    """Return every snapshot and the next one."""
    return flows[:, :-1].flatten(0, 1), flows[:, 1:].flatten(0, 1)


@torch.no_grad()
def draw(model: nn.Module, flow: Tensor, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, 3, figsize=(9, 6), layout="constrained")
    for steps, row in zip((1, 4), rows, strict=True):
        predicted = flow[:1]
        for _ in range(steps):
            predicted = model(predicted)
        truth = flow[steps]
        limit = float(truth.abs().max())
        shown = {"truth": truth, "prediction": predicted[0], "error": predicted[0] - truth}
        for axis, (title, field) in zip(row, shown.items(), strict=True):
            image = axis.imshow(field.cpu().numpy(), cmap="RdBu", vmin=-limit, vmax=limit)
            axis.set(title=f"{title}, step {steps}", xticks=[], yticks=[])
        figure.colorbar(image, ax=row, label="vorticity")
    figure.savefig(path, dpi=120)


def main(options: argparse.Namespace) -> None:
    directory = Path(options.run)
    data = directory / f"flows-{options.flows}-{options.size}.npy"
    with shoal.init(seed=0) as world:
        with world.rank_zero_first() as first:  # computed once, read by all
            if first and not data.exists():
                directory.mkdir(parents=True, exist_ok=True)
                np.save(data, solve(options.flows, options.size))
        flows = torch.from_numpy(np.load(data))
        held_out = pairs(flows[: options.flows // 8])
        trained = shoal.train(
            lambda: Emulator(options.width),
            shoal.Task(loss),
            pairs(flows[options.flows // 8 :]),
            directory=directory,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
            schedule=shoal.LRSchedule(warmup_steps=10),
            batch_size=16,
            epochs=options.epochs,
            clip=1.0,
            world=world,
        )
        metrics = {"relative error": relative_error}
        result = shoal.evaluate(trained.step, held_out, metrics=metrics)
        still, count = relative_error(*held_out)
        if world.is_rank_zero:
            draw(trained.model, flows[0].to(world.device), directory / "picture.png")
        world.print(
            f"held-out loss {result['loss']:.4f}, relative error {result['relative error']:.1%} "
            f"({still / count:.1%} if nothing moved)"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/emulator")
    parser.add_argument("--flows", type=int, default=24)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=12)
    main(parser.parse_args())
