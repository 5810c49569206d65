"""Evaluation on several ranks: every sample once, and the metric of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import cross_entropy

pytestmark = pytest.mark.processes

CLASSES = 3


def dataset(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, CLASSES, (samples,), generator=generator)


class Counting(torchmetrics.Metric):
    """A metric of one's own, whose states are a sum, a maximum, and a list."""

    total: Tensor
    largest: Tensor
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-1e9, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.total += len(target)
        self.largest = torch.maximum(self.largest, output.max())
        self.seen.append(output[:, 0])

    def compute(self) -> Tensor:
        return torch.stack((self.total, self.largest, torch.cat(self.seen).sort().values.median()))


METRICS: dict[str, Any] = {
    "accuracy": shoal.Accuracy(),
    "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
    "auroc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
    "own": Counting(),
}


def first_column(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return output[:, 0].sum(), len(target)


class Columns(torchmetrics.PearsonCorrCoef):
    """The correlation of the first column with the class: states that merge in their own way."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output[:, 0], target.to(output))


def evaluate(world: shoal.World, samples: int, batch_size: int | None = None) -> dict[str, Any]:
    torch.manual_seed(1)
    model = shoal.parallelize(nn.Linear(CLASSES, CLASSES).double(), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(cross_entropy))
    metrics = METRICS | {"column": first_column}
    if samples > 4:  # torchmetrics merges no ranks of one sample each
        metrics["pearson"] = Columns().set_dtype(torch.float64)
    return shoal.evaluate(step, dataset(samples), metrics=metrics, batch_size=batch_size)


def assert_every_sample_counts_once(ranks: Ranks, rows: list[tuple[int, int | None]]) -> None:
    for samples, batch_size in rows:
        with shoal.init(device="cpu") as world:
            expected = evaluate(world, samples)
        assert expected["samples"] == samples
        for found in ranks.call(evaluate, samples, batch_size):
            assert found["samples"] == samples
            assert found["accuracy"] == expected["accuracy"]
            assert found["own"][0] == samples
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The variance of predictions")
def test_every_sample_counts_once_on_two_ranks(two: Ranks) -> None:
    """FAILURES 1: 21 samples on 2 ranks are 21."""
    assert_every_sample_counts_once(two, [(44, 7), (21, 4)])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The variance of predictions")
def test_every_sample_counts_once_on_four_ranks() -> None:
    """FAILURES 1: 101 samples on 4 ranks are 101, and ranks may have none."""
    with Ranks(4) as four:
        assert_every_sample_counts_once(four, [(3, 4), (1, 4), (44, 16), (101, 16), (101, None)])
