"""Networks whose rows are not samples, or whose samples are padded, with dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_sequence

import shoal
from helpers.exact_models import GPTBlock

SAMPLES, WIDTH, WORDS, CLASSES = 23, 8, 11, 3


class Varied(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples of 1 to 7 rows, or words."""

    def __init__(self, *, words: bool = False) -> None:
        self.words = words

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        size = 1 + i * 5 % 7
        if self.words:
            return torch.randint(1, WORDS, (size,), generator=generator), i % CLASSES
        return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64), i % CLASSES


Items = list[tuple[Tensor, int]]


def targets(items: Items) -> Tensor:
    return torch.tensor([y for _, y in items])


def sizes(items: Items) -> Tensor:
    return torch.tensor([len(x) for x, _ in items])


def joined(items: Items) -> dict[str, Tensor]:
    """All rows, and the number of those of each sample."""
    return {"x": torch.cat([x for x, _ in items]), "sizes": sizes(items), "y": targets(items)}


def as_graphs(items: Items) -> dict[str, Tensor]:
    """A ring of the nodes of each sample, as PyTorch Geometric collates it."""
    count = sizes(items)
    start = count.cumsum(0) - count
    ends = [
        torch.stack([first + torch.arange(n), first + (torch.arange(n) + 1) % n])
        for first, n in zip(start.tolist(), count.tolist(), strict=True)
    ]
    graph = torch.arange(len(items)).repeat_interleave(count)
    found = {"edge_index": torch.cat(ends, 1), "batch": graph, "y": targets(items)}
    return {"x": torch.cat([x for x, _ in items]), **found}


def as_packed_tokens(items: Items) -> dict[str, Tensor]:
    """One row of all tokens, and where each sample begins."""
    ends = F.pad(sizes(items).cumsum(0), (1, 0)).int()
    return {"x": torch.cat([x for x, _ in items])[None], "cu_seqlens": ends, "y": targets(items)}


def padded(items: Items) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in items], batch_first=True), targets(items)


def padded_sets(items: Items) -> dict[str, Tensor]:
    x = pad_sequence([x for x, _ in items], batch_first=True)
    return {"x": x, "sizes": sizes(items), "y": targets(items)}


def padded_left(items: Items) -> tuple[Tensor, Tensor]:
    flipped = pad_sequence([x.flip(0) for x, _ in items], batch_first=True)
    return flipped.flip(1), targets(items)


def pooled(rows: Tensor, sample: Tensor, samples: int) -> Tensor:
    return rows.new_zeros(samples, rows.shape[1]).index_add(0, sample, rows)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.drop, self.last = nn.Dropout(0.3), nn.Dropout(0.2)


class Sets(Base):
    """Dropout of the elements of sets, and of the sets."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.drop(F.relu(self.layer(batch["x"])))
        count = batch["sizes"]
        sample = torch.arange(len(count)).repeat_interleave(count)
        found: Tensor = self.head(self.last(pooled(rows, sample, len(count))))
        return found


class Graphs(Base):
    """Dropout of nodes and of edges."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, (source, target) = batch["x"], batch["edge_index"]
        for _ in range(2):
            kept = torch.rand(len(source), dtype=x.dtype) < 0.7
            sent = self.drop(self.layer(x)[source]) * kept[:, None]
            x = x + torch.zeros_like(x).index_add(0, target, sent)
        found: Tensor = self.head(pooled(x, batch["batch"], len(batch["y"])))
        return found


class Tokens(Base):
    """Dropout of tokens of all samples in one row, without attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.drop(self.words(batch["x"]))
        x = x + self.last(torch.tanh(self.layer(x)))
        ends = batch["cu_seqlens"].long()
        sample = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
        found: Tensor = self.head(pooled(x[0], sample, len(ends) - 1))
        return found


class Selected(Base):
    """Dropout of the elements of a set that were selected by value, whose samples it declares."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        count = batch["sizes"]
        sample = torch.arange(len(count)).repeat_interleave(count)
        positive = batch["x"].sum(1) > 0
        rows, sample = self.layer(batch["x"][positive]), sample[positive]
        with shoal.samples(index=sample):
            rows = self.drop(rows)
        found: Tensor = self.head(pooled(rows, sample, len(count)))
        return found


class Text(nn.Module):
    """A transformer encoder with dropout everywhere, of padded words."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        empty = batch[0] == 0
        x = self.words(batch[0])
        if self.batch_first:
            x = self.encoder(x, src_key_padding_mask=empty)
        else:
            x = self.encoder(x.transpose(0, 1), src_key_padding_mask=empty).transpose(0, 1)
        found: Tensor = self.head(x.masked_fill(empty[..., None], 0).sum(1))
        return found


class CausalText(nn.Module):
    """Blocks of GPT-2, which can be split over ranks, of padded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(GPTBlock(0.2, heads=2) for _ in range(2))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.words(batch[0])
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x.masked_fill(batch[0][..., None] == 0, 0).sum(1))
        return found


class LengthFirst(Text):
    def __init__(self) -> None:
        super().__init__(batch_first=False)


class MergedHeads(Base):
    """Dropout of the weights of heads that are merged with samples, and of tokens merged with them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        empty = batch[0] == 0
        samples, length = empty.shape
        x = self.words(batch[0])
        q, k, v = self.qkv(x).view(samples, length, 3, 2, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
        scores = (q @ k.transpose(1, 2)).masked_fill(empty.repeat_interleave(2, 0)[:, None], -1e9)
        mixed = (self.drop(scores.softmax(-1)) @ v).view(samples, 2, length, -1).transpose(1, 2)
        x = self.last(F.relu(self.layer(mixed.reshape(samples * length, WIDTH))))
        found: Tensor = self.head(x.view(samples, length, -1).masked_fill(empty[..., None], 0).sum(1))
        return found


class Packed(Base):
    """Dropout inside and outside of a recurrent layer, of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.layer(batch["x"])
        packed = pack_padded_sequence(rows, batch["sizes"], batch_first=True, enforce_sorted=False)
        packed = PackedSequence(self.drop(packed.data), *packed[1:])
        found: Tensor = self.head(self.lstm(packed)[1][0][-1])
        return found


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    collate: Callable[[Items], Any]
    words: bool = False


CASES = {
    "sets": Case(Sets, joined),
    "graphs": Case(Graphs, as_graphs),
    "packed tokens": Case(Tokens, as_packed_tokens, words=True),
    "selected rows": Case(Selected, joined),
    "packed sequences": Case(Packed, padded_sets),
    "padded text": Case(Text, padded, words=True),
    "causal text": Case(CausalText, padded, words=True),
    "length first": Case(LengthFirst, padded, words=True),
    "merged heads": Case(MergedHeads, padded, words=True),
}


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    return F.cross_entropy(output, y, reduction="sum"), len(y)
