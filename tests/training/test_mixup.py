"""Mixup, CutMix and shuffled negatives on any split of the batch: the losses of plain torch."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.one_process import alone
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes

SAMPLES, BATCH, EPOCHS, WIDTH = 19, 8, 2, 5
"""The last batch of an epoch has 3 samples: some of 4 ranks have none."""


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    images = torch.randn(SAMPLES, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return images, torch.arange(SAMPLES) % 3


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(nn.Flatten(), nn.Linear(WIDTH**2, 6), nn.Tanh(), nn.Linear(6, 3))
        self.double()


def box_of(noise: shoal.Noise) -> tuple[slice, slice, float]:
    """The rows and columns that CutMix takes from the partner, and the weight of the sample."""
    rng = noise.named("cutmix").batch.generators()[0]
    half = WIDTH * (1 - rng.beta(1.0, 1.0)) ** 0.5 / 2
    middles = rng.integers(0, WIDTH, 2)
    rows, columns = (slice(max(0, round(m - half)), min(WIDTH, round(m + half))) for m in middles)
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return rows, columns, 1 - area / WIDTH**2


def weights(kind: str, noise: shoal.Noise) -> Tensor:
    if kind == "cutmix":
        return torch.tensor([box_of(noise)[2]], dtype=torch.float64)
    source = noise.named("mixup")
    return (source.batch if kind == "batch" else source).beta(0.4, 0.4, dtype=torch.float64)


def mix(kind: str, x: Tensor, other: Tensor, noise: shoal.Noise) -> Tensor:
    if kind == "cutmix":
        rows, columns, _ = box_of(noise)
        x = x.clone()
        x[:, rows, columns] = other[:, rows, columns]
        return x
    weight = weights(kind, noise)[:, None, None]
    return weight * x + (1 - weight) * other


def total_loss(kind: str, output: Tensor, y: Tensor, other: Tensor, noise: shoal.Noise) -> Tensor:
    weight = weights(kind, noise)
    own, others = (F.cross_entropy(output, target, reduction="none") for target in (y, other))
    return (weight * own + (1 - weight) * others).sum()


def inputs(kind: str, batch: Any, noise: shoal.Noise) -> Tensor:
    (x, _), (other, _) = batch
    return mix(kind, x, other, noise)


def loss(kind: str, output: Tensor, batch: Any, noise: shoal.Noise) -> tuple[Tensor, int]:
    (_, y), (_, other) = batch
    return total_loss(kind, output, y, other, noise), len(y)


def task_of(kind: str) -> shoal.Task:
    return shoal.Task(partial(loss, kind), inputs=partial(inputs, kind))


def train(
    world: shoal.World, strategy: Any, kind: str, micro_batches: int, in_a_loop: bool
) -> list[float]:
    model = shoal.parallelize(Net(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    task = task_of(kind)
    loader = shoal.Loader(dataset(), world, batch_size=BATCH, micro_batches=micro_batches, partners=1)
    if not in_a_loop:
        step = shoal.Step(model, optimizer, task)
        return [step(batch).loss for batch in loader.epochs(EPOCHS)]
    losses = []
    for batch in loader.epochs(EPOCHS):
        for micro in batch:
            output = model(inputs(kind, micro, batch.noise))
            total, count = loss(kind, output, micro, batch.noise)
            batch.backward(total=total, count=count)
        losses.append(batch.finish(model).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cache
def plain(kind: str) -> list[float]:
    """The losses in plain torch, with the partners that `roll` gives: whole batches, one process."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images, labels = dataset()
    losses = []
    for epoch in range(EPOCHS):
        order = torch.from_numpy(shoal.Permutation(SAMPLES, seed=0, epoch=epoch).indices(0, SAMPLES))
        first = epoch * SAMPLES
        for chosen in order.split(BATCH):
            x, y = images[chosen], labels[chosen]
            noise = shoal.Noise(0, first, len(x), batch_first=first)
            output = model(mix(kind, x, x.roll(1, 0), noise))
            mean = total_loss(kind, output, y, y.roll(1, 0), noise) / len(x)
            losses.append(mean.item())
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            first += len(x)
    return losses


CASES = [
    (kind, micro_batches, in_a_loop)
    for kind in ("batch", "sample", "cutmix")
    for micro_batches, in_a_loop in ((1, False), (2, False), (2, True))
]


def all_losses(world: shoal.World, strategy: Any) -> list[list[float]]:
    return [train(world, strategy, *case) for case in CASES]


def check(found: list[list[float]]) -> None:
    for (kind, *case), losses in zip(CASES, found, strict=True):
        assert losses == pytest.approx(plain(kind), rel=1e-12), (kind, *case)


def test_one_process_has_the_losses_of_plain_torch() -> None:
    check(alone(all_losses, None))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_split_has_the_losses_of_plain_torch(size: int) -> None:
    with Ranks(size) as ranks:
        for found in ranks.call(all_losses, shoal.DDP()):
            check(found)
        ranks.divide("shard=-1")
        for found in ranks.call(all_losses, shoal.FSDP()):
            check(found)


def part_of_a_run(world: shoal.World, directory: Path, kind: str, until: int) -> list[float]:
    """The losses of the steps from the checkpoint up to step `until`, in two micro-batches."""
    model = shoal.parallelize(Net(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, task_of(kind))
    loader = shoal.Loader(dataset(), world, batch_size=BATCH, micro_batches=2, partners=1)
    losses = []
    with shoal.Run(directory, step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(EPOCHS):
            losses.append(step(batch).loss)
            run.tick()
            if step.number == until:
                run.save()
                break
    return losses


@pytest.mark.parametrize("kind", ["batch", "sample"])
def test_a_run_resumes_within_an_epoch_on_other_ranks(tmp_path: Path, kind: str) -> None:
    steps = len(plain(kind))
    with Ranks(2) as ranks:
        found = ranks.call(part_of_a_run, tmp_path, kind, 2)[0]
    with Ranks(3) as ranks:
        found += ranks.call(part_of_a_run, tmp_path, kind, 4)[0]
    found += alone(part_of_a_run, tmp_path, kind, steps)
    assert found == pytest.approx(plain(kind), rel=1e-12)
