"""A small causal transformer of one's own making, and texts for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import shoal

VOCABULARY, WIDTH, LENGTH, SAMPLES = 10, 16, 12, 40


class Block(nn.Module):
    """Rotary tables as an argument, fewer heads for keys and values, a word about the sample."""

    def __init__(self, heads: int, pairs: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.pairs, self.dropout = heads, pairs, dropout
        size = WIDTH // heads
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, pairs * size), nn.Linear(WIDTH, pairs * size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], *, word: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            layer(y).unflatten(2, (-1, WIDTH // self.heads)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = scaled_dot_product_attention(
            rotated(query, rotary),
            rotated(key, rotary),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.out(y.transpose(1, 2).flatten(2)) + word[:, None]
        return x + F.dropout(self.narrow(torch.tanh(self.wide(x))), self.dropout, self.training)


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    one, other = x.chunk(2, -1)
    cosine, sine = rotary
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), -1)


class GPT(nn.Module):
    def __init__(self, heads: int = 4, pairs: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, pairs, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.features = WIDTH // heads // 2
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embedding(tokens) + self.positions(at)
        angles = at[:, None].to(x.dtype) / 10.0 ** torch.arange(self.features)
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()), word=self.words(tokens[:, 0]))
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A sum over tokens, of which each sample has another number."""
    labels = batch[1]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    return total, (labels != -1).sum()


def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    ends = torch.randint(2, LENGTH, (SAMPLES, 1), generator=generator)
    return tokens, tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= ends, -1)


def small_llama(world: shoal.World, vocabulary: int) -> nn.Module:
    """One of transformers': two layers of four heads, two for keys, in float64, alike on all ranks."""
    transformers = pytest.importorskip("transformers")
    world.reseed("weights", by_rank=False)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model
