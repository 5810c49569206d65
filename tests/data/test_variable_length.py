"""Samples of different lengths, weighted by tokens: one gradient, however the batch is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import shoal
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes

BATCH, WORDS, PADDING = 32, 13, 0


def sentences() -> list[Tensor]:
    """From 2 to 40 tokens, none of them the padding."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 41, (BATCH,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)
    ).double()


def pad(samples: list[Tensor]) -> Tensor:
    """As long as the longest of this micro-batch, so that padding differs with the division."""
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Each token from the one before it."""
    told, wanted = output[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
    total = F.cross_entropy(told, wanted, ignore_index=PADDING, reduction="sum")
    return total, (wanted != PADDING).sum()


def gradients(world: shoal.World, micro_batches: int) -> list[Tensor]:
    """Plain descent at rate 1 moves the parameters by the gradient."""
    model = shoal.parallelize(build(), world)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: batch))
    data = shoal.Loader(
        sentences(), world, batch_size=BATCH, micro_batches=micro_batches, collate_fn=pad
    )
    [batch] = data.epochs(1)
    step(batch)
    return [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    started: dict[int, Ranks] = {}
    yield lambda size: started.setdefault(size, Ranks(size))
    for some in started.values():
        some.kill()


@pytest.mark.parametrize(
    ("size", "micro_batches"), [(1, 1), (1, 32), pytest.param(4, 1, marks=pytest.mark.full), (4, 8)]
)
def test_the_gradient_is_that_of_one_mean_over_all_tokens(
    size: int, micro_batches: int, ranks: Callable[[int], Ranks]
) -> None:
    """FAILURES 2: 1 rank with 32, 32 accumulation steps of 1, 4 ranks with 8, or with 8 of 1."""
    model = build()
    total, count = loss(model(batch := pad(sentences())), batch)
    expected = torch.autograd.grad(total / count, list(model.parameters()))
    # A mean of the samples' means is another number, so the comparison could fail.
    apart = [loss(model(one[None]), one[None]) for one in sentences()]
    naive = torch.autograd.grad(
        torch.stack([total / count for total, count in apart]).mean(), list(model.parameters())
    )
    assert all(float((a - b).abs().max()) > 1e-4 for a, b in zip(naive, expected, strict=True))
    for found in ranks(size).call(gradients, micro_batches):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
