"""Modules whose rows are not samples, or in another order, are not taken for coupled layers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import shoal
from helpers.one_process import alone
from helpers.ranks import Ranks
from helpers.small_training import sgd
from shoal.training.loss_check import add_up

pytestmark = pytest.mark.processes

WIDTH, LENGTH = 6, 7


class Net(nn.Module):
    """Classifies sequences of tokens of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.inner: nn.Module = nn.Identity()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encode(tokens, lengths))
        return logits

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError


class Packed(Net):
    """The last hidden state of an LSTM of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def pack(self, tokens: Tensor, lengths: Tensor) -> PackedSequence:
        x = self.embedding(tokens)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return packed._replace(data=self.inner(packed.data))

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(self.pack(tokens, lengths))[1][0][-1]
        return hidden


class Unpacked(Packed):
    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        output, _ = pad_packed_sequence(self.lstm(self.pack(tokens, lengths))[0], batch_first=True)
        last: Tensor = output[torch.arange(len(output)), lengths - 1]
        return last


class Sorted(Packed):
    """Sorts the samples of the batch by length, as older code does."""

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        x = self.inner(self.embedding(tokens[order]))
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        hidden: Tensor = self.lstm(packed)[1][0][-1][order.argsort()]
        return hidden


class Experts(Net):
    """Each sample goes to an expert, which gets them in the order of their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.mix(self.embedding(tokens).mean(1))

    def mix(self, x: Tensor) -> Tensor:
        scores: Tensor = self.gate(x).softmax(1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (scores[:, number] > 0.3).nonzero()[:, 0]
            rows = rows[scores[rows, number].argsort()]
            mixed = mixed.index_add(0, rows, expert(self.inner(x[rows])) * scores[rows, number, None])
        return mixed


class TokenExperts(Experts):
    """Each token goes to an expert; all of them are in one tensor, ordered by expert."""

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.mix(x.flatten(0, 1)).view_as(x).mean(1)

    def mix(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        order = chosen.argsort(stable=True)
        parts = x[order].split(torch.bincount(chosen, minlength=3).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        done = self.inner(done) * weights[order, None]
        return torch.zeros_like(x).index_copy(0, order, done)


class Sets(Net):
    """The elements of all sets are in one tensor."""

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        there = torch.arange(LENGTH) < lengths[:, None]
        x = self.inner(self.embedding(tokens[there]))
        sums: Tensor = x.new_zeros(len(tokens), WIDTH).index_add(0, there.nonzero()[:, 0], x)
        return sums


class Graph(Net):
    """The nodes are the different tokens of the micro-batch."""

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        nodes, inverse = tokens.unique(return_inverse=True)
        mean: Tensor = self.inner(self.embedding(nodes)).tanh()[inverse].mean(1)
        return mean


class Numbered(Net):
    """Uses a table with a row for each position in the micro-batch, but not its values."""

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        numbers = self.inner(self.embedding(torch.arange(len(tokens)).flip(0) % 11))
        mean: Tensor = self.embedding(tokens).mean(1) + 0 * numbers
        return mean


class Summed(Sorted):
    """Returns its loss, so that only losses can be compared."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(tokens, lengths).logsumexp(1).sum()


class Normed(nn.Module):
    """Couples the rows of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt()


class Softmaxed(nn.Module):
    """Couples the rows of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.softmax(0)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch[2]
    if output.dim():
        output = nn.functional.cross_entropy(output, labels, reduction="sum")
    return output, len(labels)


def trained(
    world: shoal.World, make: type[Net], micro_batches: int, coupled: type[nn.Module] = nn.Identity
) -> tuple[float, str]:
    """The loss of the third step, and what was printed."""
    torch.manual_seed(3)
    model = make()
    model.inner = coupled()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (48, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (48,), generator=generator)
    lengths[::4] = LENGTH
    labels = torch.randint(0, 3, (48,), generator=generator)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = shoal.parallelize(model.double(), world)
        task = shoal.Task(loss, inputs=lambda batch: (batch[0], batch[1]))
        step = shoal.Step(model, sgd(model), task)
        data = (tokens, lengths, labels)
        loader = shoal.Loader(data, world, batch_size=16, micro_batches=micro_batches)
        losses = [step(batch).loss for batch in loader.epochs(1)]
    return losses[-1], printed.getvalue()


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started


EXACT = [Packed, Unpacked, Sorted, Experts, TokenExperts, Sets, Graph, Numbered, Summed]


@pytest.mark.parametrize("make", EXACT)
def test_nothing_is_printed_of_an_exact_model(several: Ranks, make: type[Net]) -> None:
    expected, _ = alone(trained, make, 1)
    for micro_batches in (1, 2):
        for found, printed in several.call(trained, make, micro_batches):
            assert found == pytest.approx(expected, rel=1e-12)
            assert not printed
    found, printed = alone(trained, make, 4)
    assert found == pytest.approx(expected, rel=1e-12)
    assert not printed


@pytest.mark.parametrize("coupled", [Normed, Softmaxed])
@pytest.mark.parametrize("make", [Packed, Sorted, Experts, TokenExperts, Sets])
def test_a_coupled_layer_of_such_a_model_is_named(
    two: Ranks, make: type[Net], coupled: type[nn.Module]
) -> None:
    for _, printed in (alone(trained, make, 2, coupled), two.call(trained, make, 1, coupled)[0]):
        assert f"the output of inner ({coupled.__name__}) for a sample depends on other" in printed


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def test_a_coupled_layer_of_a_model_that_returns_its_loss_is_named() -> None:
    _, printed = alone(trained, Summed, 2, Normed)
    assert "(Normed) for a sample depends on other samples" in printed


def test_losses_that_are_unknown_do_not_add_up() -> None:
    assert add_up([(3.0, 2), (1.0, 1), (2.0, 1)])
    assert not add_up([(3.1, 2), (1.0, 1), (2.0, 1)])
    assert not add_up([])
