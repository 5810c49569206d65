"""Losses that are not sums over samples stop where the batch is split, and speak where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks, several_ranks
from helpers.small_training import Loss, sgd

SIZE = 24
X = torch.randn(2 * SIZE, 12, generator=torch.Generator().manual_seed(0))
Y = torch.arange(2 * SIZE) % 5
WEIGHTS = torch.linspace(0.5, 1.5, 12)


class Net(nn.Module):
    """Two layers with dropout, of which losses may use a weight."""

    def __init__(self, *, own_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop, self.outer = nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 12)
        self.own_loss = own_loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        output: Tensor = self.outer(self.drop(torch.tanh(self.inner(x))))
        return {"loss": in_batch(output, (x, y))[0]} if self.own_loss else output


def in_batch(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    own = torch.arange(len(output))
    return F.cross_entropy(output @ batch[0].T, own, reduction="sum"), len(output)


def dice(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    found, wanted = output.sigmoid(), F.one_hot(batch[1], 12)
    return (1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())) * len(output), len(output)


def of_global_size(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.reshape(SIZE, -1).norm(dim=1).sum(), len(output)


def of_global_count(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), SIZE


def of_count_one(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), 1


def triplets(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.triplet_margin_loss(output, batch[0], output.roll(1, 0), reduction="sum"), len(output)


def own(output: Any, batch: Any) -> tuple[Tensor, int]:
    return output["loss"], len(batch[0])


def gathered(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    everyone, start = shoal.gather(batch[0])
    targets = torch.arange(start, start + len(output))
    return F.cross_entropy(output @ everyone.T, targets, reduction="sum"), len(output)


def denoising(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - torch.randn_like(output)).square().sum(), len(output)


def by_rank(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - torch.from_numpy(np.random.rand(*output.shape))).square().sum(), len(output)


def weighted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output, batch[1], WEIGHTS.to(output), reduction="sum")
    return total, WEIGHTS[batch[1]].sum()


def cancelling(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The sum of large terms is nothing but their rounding."""
    signs = torch.where(torch.arange(len(output)) % 2 == 0, 1.0, -1.0)[:, None].to(output)
    return (signs * (1e4 + 0 * output) / 3).sum() + 1e-4 * output.sum(), len(output)


def add_term(factor: Callable[[int], int]) -> Loss:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        total = F.cross_entropy(output, batch[1], reduction="sum")
        return total + factor(len(output)) * 3.25, len(output)

    return loss


DEPENDENT: dict[str, Loss] = {
    "in-batch negatives": in_batch,
    "Dice": dice,
    "a shape of the global batch": of_global_size,
    "the count of the global batch": of_global_count,
    "a count of 1": of_count_one,
    "triplets": triplets,
    "the model's own": own,
}
SILENT: dict[str, Loss] = {
    "shoal.gather": gathered,
    "noise": denoising,
    "noise by rank": by_rank,
    "weights of classes": weighted,
    "cancelling": cancelling,
    "a term times the count": add_term(lambda count: count),
}


def train(
    world: shoal.World, name: str, strategy: Any = None, micro_batches: int = 1, **options: Any
) -> list[float]:
    loss = (DEPENDENT | SILENT | {"a term": add_term(lambda _: 1)})[name]
    model = shoal.parallelize(Net(own_loss=loss is own), world, strategy)
    step = shoal.Step(model, sgd(model), shoal.Task(loss, inputs=lambda batch: batch, **options))
    loader = shoal.Loader((X, Y), world, batch_size=SIZE, micro_batches=micro_batches)
    return [step(batch).loss for batch in loader.epochs(1)]


def tell(world: shoal.World, strategy: Any, micro_batches: int) -> dict[str, str]:
    """The errors of the losses."""
    errors = {}
    for name in (*DEPENDENT, *SILENT):
        try:
            train(world, name, strategy, micro_batches)
        except shoal.StepError as error:
            errors[name] = str(error)
    return errors


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int, str], Ranks]]:
    with several_ranks() as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "micro_batches"),
    [
        (1, "replicate=-1", None, 2),
        (2, "replicate=-1", None, 1),
        pytest.param(2, "shard=-1", shoal.FSDP(), 1, marks=pytest.mark.full),
        pytest.param(3, "replicate=-1", None, 2, marks=pytest.mark.full),
        pytest.param(3, "shard=-1", shoal.FSDP(), 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.processes
def test_a_loss_that_depends_on_the_split_is_an_error(
    started: Callable[[int, str], Ranks], size: int, layout: str, strategy: Any, micro_batches: int
) -> None:
    for errors in started(size, layout).call(tell, strategy, micro_batches):
        assert errors.keys() == DEPENDENT.keys()
        for name, error in errors.items():
            assert "which do not add up: results depend on the number of processes" in error, name
            assert "test_split_loss.py:" in error
            assert "depends_on_batch=True" in error


def test_the_error_gives_the_losses_and_the_counts_that_do_not_add_up(world: shoal.World) -> None:
    with pytest.raises(shoal.StepError) as caught:
        train(world, "the count of the global batch", micro_batches=2)
    assert " and a count of 24 for 12 samples" in caught.value.given
    assert " and counts of 24 and 24, which do not add up" in caught.value.found
    with pytest.raises(shoal.StepError) as caught:
        train(world, "Dice", micro_batches=2)
    assert "counts" not in caught.value.found


def test_one_process_prints_a_line_and_trains(
    world: shoal.World, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in DEPENDENT:
        assert np.isfinite(train(world, name)).all()
        said = capsys.readouterr().out
        assert "which do not add up: results depend on the number of processes" in said, name
    for name in (*SILENT, "a term"):
        train(world, name)
        assert "add" not in capsys.readouterr().out, name


def test_dependence_that_is_declared_is_not_checked(
    world: shoal.World, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in DEPENDENT:
        assert np.isfinite(train(world, name, micro_batches=2, depends_on_batch=True)).all()
    assert "add up" not in capsys.readouterr().out


def test_a_term_without_samples_is_named_where_it_is_added_several_times(
    world: shoal.World, capsys: pytest.CaptureFixture[str]
) -> None:
    train(world, "a term", micro_batches=2)
    assert "adds 3.25 in each micro-batch, regardless of its samples" in capsys.readouterr().out
