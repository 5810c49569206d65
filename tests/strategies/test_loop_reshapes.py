"""Custom loops that reshape smaller micro-batches to the size of the global batch are found."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from helpers.small_training import sgd
from shoal.util.errors import StepError

pytestmark = pytest.mark.processes

SIZE, WIDTH = 10, 60

Loss = Callable[[Tensor, Tensor, shoal.Batch], Tensor]


def relative(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    """The mistake, as in the relative error of fields."""
    wrong, right = output.view(SIZE, -1), target.view(SIZE, -1)
    return torch.sum((wrong - right).norm(dim=1) / right.norm(dim=1))


def reshaped(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    """The same with a copy."""
    return torch.sum((output.t().contiguous().t() - target).reshape(SIZE, -1).norm(dim=1))


def train(
    world: shoal.World,
    loss: Loss,
    samples: int = 2 * SIZE,
    micro_batches: int = 1,
    model: nn.Module | None = None,
) -> None:
    torch.manual_seed(0)
    values = torch.randn(samples, WIDTH)
    net = shoal.parallelize(nn.Linear(WIDTH, WIDTH) if model is None else model, world)
    optimizer = sgd(net, 1e-4)
    loader = shoal.Loader(
        (values, values.cumsum(1)), world, batch_size=SIZE, micro_batches=micro_batches
    )
    for batch in loader.epochs(1):
        for x, y in batch:
            batch.backward(total=loss(net(x), y, batch), count=len(y), model=net)
        batch.finish(net)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("loss", [relative, reshaped])
def test_a_reshape_to_the_global_batch_is_printed_once_with_its_place(
    world: shoal.World, loss: Loss, capsys: pytest.CaptureFixture[str]
) -> None:
    train(world, loss, micro_batches=2)
    [line] = [each for each in capsys.readouterr().out.splitlines() if "reshape" in each]
    assert re.search(r"test_loop_reshapes\.py:\d+: a reshape of \(5, 60\) to 10 rows", line)
    assert "output.view(len(output), -1)" in line


@pytest.mark.parametrize("loss", [relative, reshaped])
def test_one_that_stays_with_fewer_samples_raises(world: shoal.World, loss: Loss) -> None:
    with pytest.raises(StepError, match=r"a reshape of \(3, 60\) to 10 rows") as caught:
        train(world, loss, SIZE + 6, micro_batches=2)
    assert "has 3 samples" in caught.value.found
    assert "output.view(len(output), -1)" in caught.value.fix


def test_rows_that_are_no_multiple_of_the_samples_raise_at_once(world: shoal.World) -> None:
    with pytest.raises(StepError, match=r"a reshape of \(3, 60\) to 10 rows"):
        train(world, relative, SIZE, micro_batches=3)


def test_one_micro_batch_on_one_process_is_the_global_batch(
    world: shoal.World, capsys: pytest.CaptureFixture[str]
) -> None:
    train(world, relative)
    assert "reshape" not in capsys.readouterr().out


class Attending(nn.Module):
    """Five tokens with two heads, so that five samples have 25 and 50 rows; and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.convolution = nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, values: Tensor) -> Tensor:
        tokens = values.view(len(values), 5, 12)
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        output: Tensor = self.convolution(self.layer(tokens)).flatten(1)
        return output


def contrastive(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    everyone, start = batch.gather(F.normalize(output))
    everyone = everyone.view(len(everyone), 2, -1).flatten(1)
    return F.cross_entropy(output @ everyone.T, start + torch.arange(len(output)), reduction="sum")


def diffusion(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    noised = 0.9 * target + 0.1 * torch.randn(len(target), 1)
    return torch.sum((output - noised).view(len(output), 3, -1).square().mean((1, 2)))


def regularized(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    return output.square().sum() + torch.sum(output.view(len(output), -1).norm(dim=1))


def triplets(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    one, other, third = output.view(len(output), 3, -1).unbind(1)
    return F.triplet_margin_loss(one, other, third, reduction="sum")


def tokens(output: Tensor, target: Tensor, batch: shoal.Batch) -> Tensor:
    """Two tokens for each sample: with two micro-batches or ranks, as many as in the global batch."""
    rows = output.view(len(output), 2, -1).view(2 * len(output), -1)
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long), reduction="sum") / 2


SOUND = [contrastive, diffusion, regularized, triplets, tokens]


@pytest.mark.parametrize("loss", SOUND)
@pytest.mark.parametrize("model", [None, Attending])
def test_other_losses_are_not_reported(
    world: shoal.World, loss: Loss, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    micro_batches = 1 if loss is contrastive else 2
    train(world, loss, SIZE + 6, micro_batches, model and model())
    assert "reshape" not in capsys.readouterr().out


def said(world: shoal.World, loss: Loss, model: Any = None, samples: int = SIZE + 6) -> list[str]:
    """The lines that a rank prints on reshapes."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(world, loss, samples, 1, model and model())
    return [line for line in out.getvalue().splitlines() if "reshape" in line]


def test_ranks_find_it(ranks_of: Callable[[int], Ranks]) -> None:
    two, three = ranks_of(2), ranks_of(3)
    [line], nothing = two.call(said, relative, None, 2 * SIZE)
    assert "(5, 60) to 10 rows" in line
    assert nothing == []
    for error in two.errors(StepError, said, relative):
        assert "(3, 60) to 10 rows" in error.given
    for error in three.errors(StepError, said, relative):
        assert "to 10 rows" in error.given
    for ranks in (two, three):
        for loss in SOUND:
            assert ranks.call(said, loss, Attending) == [[]] * ranks.size
