"""Dropout for rows that are not samples, and for padded samples: the same numbers at any split."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.exact_layers import PLANS
from helpers.keyed_draws import Calling, keyed
from helpers.ranks import Ranks, several_ranks
from helpers.row_models import (
    CASES,
    WIDTH,
    WORDS,
    Base,
    Case,
    Text,
    Varied,
    as_packed_tokens,
    joined,
    loss,
    padded,
    padded_left,
    pooled,
)
from shoal.data.micro import MicroBatch
from shoal.strategies.random_draws.draws import register
from shoal.strategies.random_draws.row_index import BatchRows, row_index

FULL, LONG = pytest.mark.full, pytest.mark.long


def train(
    world: shoal.World, case: Case, micro_batches: int = 1, strategy: Any = None, epochs: int = 1
) -> tuple[list[float], str]:
    """Losses and norms of all steps, and what was printed."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = shoal.parallelize(case.model().double(), world, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda b: (b,)), clip=1.0)
        loader = shoal.Loader(
            Varied(words=case.words),
            world,
            batch_size=7,
            micro_batches=micro_batches,
            collate_fn=case.collate,
        )
        taken = [step(batch) for batch in loader.epochs(epochs)]
    return [each for one in taken for each in (one.loss, one.norm)], printed.getvalue()


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int, str], Ranks]]:
    with several_ranks(seed=3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "micro_batches"),
    [
        (1, "replicate=-1", None, 3),
        (2, "replicate=-1", None, 1),
        pytest.param(2, "shard=-1", shoal.FSDP(), 2, marks=FULL),
        pytest.param(3, "replicate=-1", None, 2, marks=FULL),
        pytest.param(4, "shard=-1", shoal.FSDP(), 1, marks=LONG),
        pytest.param(4, "replicate=2,shard=2", shoal.FSDP(), 1, marks=LONG),
    ],
)
@pytest.mark.processes
def test_the_split_changes_no_number(
    started: Callable[[int, str], Ranks], size: int, layout: str, strategy: Any, micro_batches: int
) -> None:
    for name, case in CASES.items():
        with shoal.init(seed=3) as world:
            alone, printed = train(world, case)
        assert "random numbers were drawn" not in printed, name
        for found, text in started(size, layout).call(train, case, micro_batches, strategy):
            assert found == pytest.approx(alone, rel=1e-12), name
            assert "random numbers were drawn" not in text, name


@pytest.mark.parametrize(
    ("size", "layout", "micro_batches"),
    [
        pytest.param(2, "tensor=2", 2, marks=FULL),
        pytest.param(4, "replicate=2,tensor=2", 1, marks=LONG),
    ],
)
@pytest.mark.processes
def test_heads_and_features_of_a_rank_are_those_of_padded_samples(
    started: Callable[[int, str], Ranks], size: int, layout: str, micro_batches: int
) -> None:
    case = CASES["causal text"]
    with shoal.init(seed=3) as world:
        alone, _ = train(world, case)
    plan = shoal.TensorParallel(plan=PLANS["GPT"])
    for found, _ in started(size, layout).call(train, case, micro_batches, plan):
        assert found == pytest.approx(alone, rel=1e-12)


class Unlisted(Base):
    """Dropout of the elements of sets of which the batch does not tell the samples."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        rows = self.drop(F.relu(self.layer(batch["x"])))
        found: Tensor = self.head(torch.stack([each.sum(0) for each in rows.split(batch["sizes"])]))
        return found


def unlisted(items: Any) -> dict[str, Any]:
    return {**joined(items), "sizes": [len(x) for x, _ in items]}


class Attending(Base):
    """Dropout of attention between packed tokens, whose numbers belong to two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ends = batch["cu_seqlens"].long()
        sample = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
        x = self.layer(self.words(batch["x"]))
        apart = sample[:, None] != sample
        weights = (x @ x.transpose(1, 2)).masked_fill(apart, -1e9).softmax(-1)
        mixed = self.drop(weights[:, None])[:, 0] @ x
        found: Tensor = self.head(pooled(mixed[0], sample, len(ends) - 1))
        return found


class Pairs(Base):
    """Dropout for pairs of words, the first word of each in the faster dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.layer(self.words(batch[0]))
        both = torch.cat([x, x.flip(2)], 2).unflatten(2, (2, -1)).transpose(1, 2).flatten(1, 2)
        found: Tensor = self.head(self.drop(both).sum(1))
        return found


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (Case(Unlisted, unlisted), "rows that are not samples, in drop;"),
        (Case(Attending, as_packed_tokens, words=True), "rows that are not samples, in drop;"),
        (Case(Pairs, padded, words=True), "a multiple of the length of padded sequences, in drop;"),
        (Case(Text, padded_left, words=True), "padded on the left to different lengths, in encoder"),
    ],
)
@pytest.mark.processes
def test_what_is_unknown_is_printed_once(
    started: Callable[[int, str], Ranks], case: Case, line: str
) -> None:
    for size, micro_batches in ((1, 2), (2, 1)):
        first, *others = started(size, "replicate=-1").call(train, case, micro_batches, None, 3)
        assert first[1].count(line) == 1, first[1]
        assert all("random numbers" not in text for _, text in others)


def rows(value: Any, samples: int, number: int) -> list[int] | None:
    found = BatchRows(value, samples).index(number)
    return None if found is None else found.samples.tolist()


def test_batches_tell_the_samples_of_rows() -> None:
    tensor = torch.tensor
    assert rows(tensor([0, 2, 2, 5]), 3, 5) == [0, 0, 2, 2, 2]
    assert rows({"offsets": tensor([0, 2, 4])}, 3, 5) == [0, 0, 1, 1, 2]
    assert rows((torch.zeros(5, 4), tensor([2, 0, 3])), 3, 5) == [0, 0, 2, 2, 2]
    assert rows([tensor([0, 0, 2, 2, 2])], 3, 5) == [0, 0, 2, 2, 2]
    assert rows({"batch": tensor([2, 0, 0, 1, 0])}, 3, 5) == [2, 0, 0, 1, 0]
    ring = tensor([[0, 4, 1, 2], [1, 3, 0, 3]])
    assert rows({"ptr": tensor([0, 2, 5]), "edge_index": ring}, 2, 4) == [0, 1, 0, 1]
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    assert rows({"x": nested}, 2, 3) == [0, 0, 1]
    sequences = [torch.zeros(1), torch.zeros(3), torch.zeros(2)]
    packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    assert rows((packed,), 3, 6) == [1, 2, 0, 1, 2, 1]


def test_a_batch_that_tells_nothing_or_two_things_is_not_believed() -> None:
    tensor = torch.tensor
    assert rows(torch.zeros(5, 4), 3, 5) is None
    assert rows({"label": tensor([2, 0, 0, 1, 0])}, 3, 5) is None  # labels of rows
    assert rows((tensor([1.0, 4.0]), tensor([True, False])), 2, 5) is None
    assert rows((tensor([1, 4]), tensor([4, 1])), 2, 5) is None
    assert rows((tensor([0, 2, 3]), torch.zeros(5)), 3, 5) is None  # numbers of rows, or first rows


def test_packed_rows_of_unknown_order_are_not_believed() -> None:
    lengths = torch.tensor([1, 3, 2])
    sequences = torch.zeros(3, 3)
    ordered = nn.utils.rnn.pack_padded_sequence(sequences, lengths.sort(descending=True)[0], True)
    for told, found in ((lengths, None), (torch.tensor([3, 2, 1]), [0, 1, 2, 0, 1, 0])):
        batch = BatchRows((sequences, told), 3)
        batch.add_packed(ordered.batch_sizes, None)
        index = batch.index(6)
        assert (index and index.samples.tolist()) == found
    batch = BatchRows((torch.zeros(6, 2), lengths), 3)  # rows of samples beside packed ones
    batch.add_packed(ordered.batch_sizes, torch.tensor([1, 2, 0]))
    assert batch.index(6) is None


def test_places_count_the_rows_of_a_sample() -> None:
    found = row_index(torch.tensor([1, 0, 1, 1, 0]))
    assert found.places.tolist() == [0, 0, 1, 2, 1]
    assert found.last == 2


@pytest.mark.parametrize(
    ("sequences", "left"),
    [
        ([[5, 6, 7], [8, 0, 0]], False),
        ([[5, 6, 7], [0, 0, 8], [0, 0, 9]], True),
        ([[0, 0, 5], [0, 0, 6]], True),  # to a multiple
        ([[4, 4, 5], [6, 4, 7], [4, 4, 6]], False),  # a word that sequences begin with
        ([[5, 5], [5, 5]], False),
    ],
)
def test_left_padding_is_known_by_words(sequences: list[list[int]], left: bool) -> None:
    words = torch.tensor(sequences)
    for tensor in (words, words[..., None].expand(-1, -1, 2).float()):
        assert (
            BatchRows((tensor, torch.zeros(len(tensor))), len(tensor)).is_padded_left([words.shape[1]])
            == left
        )


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        ([[1, 1, 1], [1, 0, 0]], False),
        ([[1, 1, 1], [0, 0, 1]], True),
        ([[1, 1, 0], [1, 0, 0]], False),
        ([[0, 1, 1], [0, 0, 1]], True),
    ],
)
def test_left_padding_is_known_by_a_mask(mask: list[list[int]], left: bool) -> None:
    words = torch.tensor([[3, 3, 5], [3, 3, 6]])
    assert BatchRows({"ids": words, "mask": torch.tensor(mask)}, 2).is_padded_left([3]) == left


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"index": [0, 1]}, "an index is a tensor"),
        ({"index": torch.zeros(3)}, "dtype is torch.float32"),
        ({"index": torch.zeros(3, 1, dtype=torch.int64)}, r"shape \(3, 1\)"),
        ({"index": torch.tensor([0, -1])}, "the index holds -1"),
        ({"index": torch.tensor([0, 1]), "dim": None}, "there are no samples"),
        ({"index": torch.tensor([0, 1])}, r"an index|the index has 2 rows of samples up to number 1"),
        ({"index": torch.tensor([0, 1, 4])}, "up to number 4, and the micro-batch has 4 samples"),
    ],
)
def test_a_wrong_index_is_refused(arguments: dict[str, Any], found: str) -> None:
    drop = nn.Dropout(0.5)
    register(drop)
    with pytest.raises(shoal.StepError, match=found), shoal.samples(**arguments):
        keyed(lambda: drop(torch.ones(3, 2)), MicroBatch(None, 0, 4, 1.0))


def test_sizes_beyond_the_counter_are_refused() -> None:
    drop = nn.Dropout(0.5)
    register(drop)
    micro = MicroBatch(None, 0, 1, 1.0)
    keyed(lambda: drop(torch.ones(1, 1, 1, 2, 1, 1, 1)), micro)
    with pytest.raises(shoal.StepError, match=r"flatten the dimensions before the last"):
        keyed(lambda: drop(torch.ones(1, 2, 1, 1, 1, 1, 1)), micro)
    with pytest.raises(shoal.StepError, match=r"larger than 2\*\*8, 2\*\*12, 2\*\*20, 2\*\*20"):
        keyed(lambda: drop(torch.ones(1, 2**12 + 1, 1, 1, 1)), micro)


def test_a_longer_padding_changes_no_number() -> None:
    drop = nn.Dropout(0.5)
    register(drop)

    def drawn(length: int) -> list[Tensor]:
        shape = (3, 2, length, length)
        micro = MicroBatch(None, 0, 3, 1.0)
        calls = (
            lambda: drop(torch.ones(shape)),
            Calling(lambda: torch.rand(shape)),
            Calling(lambda: torch.randn(shape, dtype=torch.float64)),
        )
        for call in calls[1:]:
            register(call)
        return [keyed(call, micro) for call in calls]

    longest = drawn(48)
    for length in (1, 3, 17, 40):
        for one, other in zip(drawn(length), longest, strict=True):
            assert torch.equal(one, other[:, :, :length, :length])
