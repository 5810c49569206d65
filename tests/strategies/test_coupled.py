"""Layers that couple samples by the contract of shoal.Coupled: batch renorm, a vector quantiser."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.reference import LEARNING_RATE, SEED, Trained, distance

pytestmark = pytest.mark.processes

SAMPLES, BATCH, STEPS = 42, 16, 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, seed=SEED) as started:
        yield started


class BatchRenorm(shoal.Coupled):
    """Batch renormalization (Ioffe 2017)."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups(x)
        count = groups.sum(x.new_ones(len(x), 1))
        mean = groups.sum(x) / count
        variance = groups.sum((x - groups.expand(mean)).square()) / count
        running = (self.variance + 1e-3).sqrt()
        ratio = ((variance + 1e-3).sqrt() / running).detach().clamp(1 / 3, 3)
        shift = ((mean - self.mean) / running).detach().clamp(-5, 5)
        groups.update(self._move, mean, variance)
        y = (x - groups.expand(mean)) / (groups.expand(variance) + 1e-3).sqrt()
        return y * groups.expand(ratio) + groups.expand(shift)

    def _move(self, mean: Tensor, variance: Tensor) -> None:
        self.mean.lerp_(mean, 0.1)
        self.variance.lerp_(variance, 0.1)


class Codebook(shoal.Coupled):
    """A vector quantiser whose codebook is a moving average (van den Oord et al. 2017)."""

    codes: Tensor
    sums: Tensor
    counts: Tensor

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups(x)
        nearest = F.one_hot(torch.cdist(x.detach(), self.codes).argmin(1), len(self.codes)).to(x)
        chosen = nearest.unsqueeze(2) * x.detach().unsqueeze(1)
        groups.update(self._move, groups.sum(nearest), groups.sum(chosen))
        quantized = nearest @ self.codes
        return x + (quantized - x).detach()

    def _move(self, counts: Tensor, sums: Tensor) -> None:
        self.counts.lerp_(counts, 0.05)
        self.sums.lerp_(sums, 0.05)
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(5, 6), BatchRenorm(6), nn.Tanh(), Codebook(7, 6), nn.Linear(6, 3)
    ).double()


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def train(world: shoal.World, statistics: int | str, micro_batches: int) -> Trained:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    model = shoal.parallelize(build(), world, statistics=statistics)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    loader = shoal.Loader((data, labels), world, batch_size=BATCH, micro_batches=micro_batches)
    results = [step(batch) for batch in itertools.islice(loader.epochs(100), STEPS)]
    state: dict[str, np.ndarray[Any, Any]] = {
        name: value.detach().numpy().copy() for name, value in model.state_dict().items()
    }
    return Trained(state, [each.norm for each in results], [each.loss for each in results])


@pytest.mark.full
@pytest.mark.parametrize(
    ("statistics", "micro_batches"),
    [(4, 3), *(pytest.param(*row, marks=pytest.mark.full) for row in [("batch", 1), (4, 1), (16, 2)])],
)
def test_layers_of_the_contract_train_as_in_one_process(
    ranks: Ranks, statistics: int | str, micro_batches: int
) -> None:
    with shoal.init(device="cpu", seed=SEED) as world:
        expected = train(world, statistics, 1)
    for found in ranks.call(train, statistics, micro_batches):
        assert distance(found, expected) < 1e-9


def test_statistics_of_a_rank_differ(ranks: Ranks) -> None:
    """What the contract changes."""
    with shoal.init(device="cpu", seed=SEED) as world:
        expected = train(world, "batch", 1)
    assert distance(ranks.call(train, "rank", 1)[0], expected) > 1e-4
