"""Losses that couple samples, or weigh tokens, over ranks: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import shoal
from helpers.ranks import Ranks
from shoal.data.gather import gather_rows
from shoal.data.micro import MicroBatch
from shoal.util.errors import StepError

pytestmark = pytest.mark.processes

SAMPLES, BATCH, STEPS = 19, 8, 6  # the last batch of an epoch has 3 samples: some of 4 ranks have none


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:

        @cache
        def of(size: int, layout: str = "replicate=-1") -> Ranks:
            return stack.enter_context(Ranks(size, layout=layout))

        yield of


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, values: Tensor) -> Tensor:
        return torch.cat((F.normalize(self.body(values)), self.scale.expand(len(values), 1)), 1)


def contrast(output: Tensor, everyone: Tensor, start: int) -> tuple[Tensor, int]:
    """InfoNCE: each sample against the noisy copies of all samples of the global batch."""
    own = torch.arange(start, start + len(output))
    scores = output[:, -1:] * (output[:, :-1] @ everyone[:, :-1].roll(1, 1).T)
    return F.cross_entropy(scores, own, reduction="sum"), len(output)


def loss(output: Tensor, batch: tuple[Tensor]) -> tuple[Tensor, int]:
    return contrast(output, *shoal.gather(output))


def dataset() -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return (torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),)


def train(world: shoal.World, raw: bool) -> tuple[list[float], list[Tensor]]:
    model = shoal.parallelize(Encoder().double(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=None if raw else 1.0)
    data = shoal.Loader(dataset(), world, batch_size=BATCH)
    losses = []
    for _, batch in zip(range(STEPS), data.epochs(9), strict=False):
        if not raw:
            losses.append(step(batch).loss)
            continue
        for micro in batch:
            output = model(micro[0])
            total, count = contrast(output, *batch.gather(output))
            batch.backward(total=total, count=count, model=model)
        losses.append(batch.finish(model, clip=1.0).loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(shoal.evaluate(step, dataset(), batch_size=BATCH)["loss"])
    return losses, [p.detach().clone() for p in model.parameters()]


@cache
def plain() -> tuple[list[float], list[Tensor]]:
    """The same in plain torch, whole batches in one process."""
    model = Encoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, position = [], 0

    def mean(batch: Tensor) -> Tensor:
        output = model(batch)
        return contrast(output, output, 0)[0] / len(batch)

    for _ in range(STEPS):
        epoch, offset = divmod(position, SAMPLES)
        stop = min(offset + BATCH, SAMPLES)
        indices = shoal.Permutation(SAMPLES, seed=0, epoch=epoch).indices(offset, stop)
        value = mean(dataset()[0][torch.from_numpy(indices)])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        position += stop - offset
    parts = dataset()[0].split(BATCH)
    losses.append(sum(mean(part).item() * len(part) for part in parts) / SAMPLES)
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("raw", [False, True], ids=["step", "own loop"])
def test_a_contrastive_loss_is_that_of_one_process(
    size: int, raw: bool, ranks: Callable[..., Ranks]
) -> None:
    """FAILURES 28: no factor of the number of ranks in the gradient."""
    losses, parameters = plain()
    for ours, found in ranks(size).call(train, raw):
        assert ours == pytest.approx(losses, rel=1e-9)
        for one, other in zip(found, parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def gathered(world: shoal.World) -> tuple[list[float], int, list[float]]:
    """Rank r has r + 1 rows of r; each rank's loss weighs the rows of rank r by r + 1."""
    rows = torch.full((world.data_rank + 1, 1), float(world.data_rank), requires_grad=True)
    everyone, start = gather_rows(rows, MicroBatch(None, 0, len(rows), 1.0, world))
    (everyone * (everyone.detach() + 1)).sum().backward()
    assert rows.grad is not None
    return everyone.flatten().tolist(), start, rows.grad.flatten().tolist()


def test_ranks_may_have_different_numbers_of_rows(ranks: Callable[..., Ranks]) -> None:
    everyone = [0.0] + [1.0] * 2 + [2.0] * 3 + [3.0] * 4
    starts = enumerate((0, 1, 3, 6), start=1)
    expected = [(everyone, start, [4.0 * rows] * rows) for rows, start in starts]
    assert ranks(4).call(gathered) == expected


def test_only_ranks_with_other_samples_are_asked(ranks: Callable[..., Ranks]) -> None:
    found = ranks(4, "pipeline=2,replicate=2").call(gathered)
    everyone = [0.0, 1.0, 1.0]
    assert found == [(everyone, 0, [2.0]), (everyone, 1, [4.0] * 2)] * 2


class Centred(nn.Linear):
    def forward(self, values: Tensor) -> Any:
        output = super().forward(values)
        return output - shoal.gather(output).all.mean(0)


def centred(world: shoal.World) -> float:
    model = shoal.parallelize(Centred(4, 1).double(), world)
    task = shoal.Task(lambda output, batch: (output.sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    (batch, *_) = shoal.Loader(dataset(), world, batch_size=BATCH).epochs(1)
    return round(step(batch).loss, 12)


def test_the_model_itself_may_gather(ranks: Callable[..., Ranks]) -> None:
    assert set(ranks(4).call(centred)) == {0.0}


def test_outside_a_task_there_is_nobody_to_ask() -> None:
    with pytest.raises(StepError, match="no function of a Task is running"):
        shoal.gather(torch.ones(1))


SENTENCES, WORDS, PADDING = 32, 13, 0


def sentences() -> list[Tensor]:
    """From 2 to 40 tokens, none of them the padding."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 41, (SENTENCES,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)
    ).double()


def tokens(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Each token from the one before it."""
    told, wanted = output[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
    total = F.cross_entropy(told, wanted, ignore_index=PADDING, reduction="sum")
    return total, (wanted != PADDING).sum()


def gradients(world: shoal.World, micro_batches: int) -> list[Tensor]:
    """Plain descent at rate 1 moves the parameters by the gradient."""
    model = shoal.parallelize(language_model(), world)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = shoal.Step(model, optimizer, shoal.Task(tokens, inputs=lambda batch: batch))
    pad = partial(pad_sequence, batch_first=True)  # to the longest of a micro-batch
    options: dict[str, Any] = {"micro_batches": micro_batches, "collate_fn": pad}
    [batch] = shoal.Loader(sentences(), world, batch_size=SENTENCES, **options).epochs(1)
    step(batch)
    return [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 1), (1, 32), (4, 8)])
def test_the_gradient_is_that_of_one_mean_over_all_tokens(
    size: int, micro_batches: int, ranks: Callable[[int], Ranks]
) -> None:
    """FAILURES 2: 1 rank with 32, 32 accumulation steps of 1, 4 ranks with 8 of 1."""
    model = language_model()
    total, count = tokens(model(batch := pad_sequence(sentences(), batch_first=True)), batch)
    expected = torch.autograd.grad(total / count, list(model.parameters()))
    for found in ranks(size).call(gradients, micro_batches):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
