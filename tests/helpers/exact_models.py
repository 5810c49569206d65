"""Networks that people train, small: with dropout, BatchNorm, stochastic depth and other draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

WIDTH, WORDS, CLASSES, IGNORE = 8, 10, 3, -100
LENGTH = 5
"""Some micro-batches have as many samples, so that one size fits two dimensions."""

EVEN = 4
"""Positions, and heads, of a network that can be split over two axes of two ranks."""


class Attention(nn.Module):
    """Causal attention with dropout of its weights and of its result, as GPT-2 has it."""

    def __init__(self, dropout: float, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.last, self.size = dropout, nn.Dropout(dropout), WIDTH // heads

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, 3, self.size))  # of this rank, if it has some of them
        query, key, value = heads.transpose(1, 2).unbind(3)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        found: Tensor = self.last(self.out(mixed.transpose(1, 2).flatten(2)))
        return found


class GPTBlock(nn.Module):
    def __init__(self, dropout: float, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention(dropout, heads)
        self.between, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        found: Tensor = x + self.drop(self.narrow(F.gelu(self.wide(self.between(x)))))
        return found


class GPT(nn.Module):
    """Dropout 0.1 everywhere: embedding, attention, residual branches."""

    order: Tensor

    def __init__(
        self, length: int = LENGTH, heads: int = 2, dropout: float = 0.1, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(length), persistent=False)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(length, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(dropout, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens) + self.places(self.order))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.convolution = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(each) for each in (width, width, 4 * width))
        self.skip = nn.Sequential(
            nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.convolution(y)))
        return F.relu(self.norms[2](self.expand(y)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-50 with two narrow blocks; the last has scale 0 at first, as in torchvision's recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([Bottleneck(4, 2, 1), Bottleneck(8, 2, 2)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x.mean((2, 3)))
        return found


def stochastic_depth(x: Tensor, p: float, training: bool) -> Tensor:
    """As torchvision writes it, with mode="row"."""
    if not training:
        return x
    noise = torch.empty([len(x)] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(1 - p).div_(1 - p)


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """As timm writes it."""
    if not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(1 - p)
    return x * random_tensor.div_(1 - p)


class ViTBlock(nn.Module):
    def __init__(self, path: Callable[[Tensor, float, bool], Tensor], p: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.path, self.p = path, p

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.path(self.attention(y, y, y, need_weights=False)[0], self.p, self.training)
        return x + self.path(self.mlp(self.between(x)), self.p, self.training)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 10, WIDTH) * 0.1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places


class ViT(nn.Module):
    """A vision transformer whose branches are dropped by sample (Huang et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Patches()
        self.blocks = nn.ModuleList([ViTBlock(stochastic_depth, 0.2), ViTBlock(drop_path, 0.4)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x[:, 0]))
        return found


class Convolutions(nn.Sequential):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout2d(0.2),
        )


class UNet(nn.Module):
    """One level down and up, with BatchNorm and channels that are dropped (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Convolutions(1, 4), Convolutions(4, 6), Convolutions(8, 4)])
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        wide = self.blocks[0](images)
        deep = self.blocks[1](F.max_pool2d(wide, 2))
        found: Tensor = self.head(self.blocks[2](torch.cat([wide, self.up(deep)], 1)))
        return found


class Drops(nn.Module):
    """Each layer of torch that draws, and functions that draw as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=first)
            for first in (False, True)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)
        self.drops = nn.ModuleList([nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)])
        self.channels = nn.Dropout1d(0.4)
        self.planes = nn.ModuleList([nn.Dropout2d(0.2), nn.Dropout3d(0.2)])
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.rrelu = nn.RReLU()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x.transpose(0, 1)).transpose(0, 1)  # (length, samples, width)
        h = self.recurrent(self.blocks[1](h))[0]
        for drop in self.drops:
            h = drop(h)
        h = h + self.attention(h, h, h, need_weights=True)[0]  # over samples * heads
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)
        h = self.channels(self.convolution(h.transpose(1, 2))).transpose(1, 2)
        h = self.planes[0](h.unsqueeze(-1)).squeeze(-1)
        h = self.planes[1](h[..., None, None])[..., 0, 0]
        h = self.rrelu(h) * F.gumbel_softmax(h, dim=-1)
        h = h * torch.bernoulli(torch.full((len(h), 1, 1), 0.8, dtype=h.dtype)) / 0.8
        h = stochastic_depth(h, 0.2, self.training)
        h = h + torch.rand(len(h), 1, 1, dtype=h.dtype) + 0.1 * torch.randn_like(h)
        h = h + torch.randint(0, 3, h.shape) + torch.rand(WIDTH, dtype=h.dtype)  # no sample dimension
        h = h + torch.normal(h.detach(), 0.1) + 0.1 * torch.poisson(torch.ones_like(h))
        flat = F.dropout(h.reshape(-1, WIDTH), 0.2).reshape(h.shape)  # (samples * length, width)
        output: Tensor = self.last(flat[:, :, torch.randperm(WIDTH)])
        return output.mean(1)


class Branch(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), drop

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(torch.tanh(self.layer(x)))
        return found


class Shared(nn.Module):
    """One dropout layer inside of all blocks, one between them, and noise outside of all modules."""

    def __init__(self) -> None:
        super().__init__()
        inside = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Branch(inside) for _ in range(4))
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(block(x)) + 0.1 * torch.rand_like(x)
        found: Tensor = self.last(x)
        return found.mean(1)


class Contrastive(nn.Module):
    """An encoder that runs twice: two views of a sample by dropout alone (SimCSE, Gao et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.normalize(x, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.encode(x), self.encode(x)], 1)


class Example(NamedTuple):
    """A network, the shape of a sample, whether it has BatchNorm, and numbers of micro-batches."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    normalizes: bool = False
    micro_batches: tuple[int, ...] = (1, 3)


EXAMPLES = {
    "GPT": Example(GPT, (LENGTH,)),
    "Even GPT": Example(lambda: GPT(EVEN, EVEN), (EVEN,)),
    "Untied GPT": Example(lambda: GPT(tied=False), (LENGTH,)),
    "ResNet": Example(ResNet, (1, 6, 6), normalizes=True),
    "ViT": Example(ViT, (1, 6, 6)),
    "UNet": Example(UNet, (1, 4, 4), normalizes=True),
    "Drops": Example(Drops, (LENGTH, WIDTH)),
    "Shared": Example(Shared, (LENGTH, WIDTH)),
    "Contrastive": Example(Contrastive, (WIDTH,), micro_batches=(1,)),  # its loss couples them
}


def build(name: str) -> nn.Module:
    torch.manual_seed(2)
    return EXAMPLES[name].build().double()


def dataset(name: str, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels; some tokens have no label."""
    generator = torch.Generator().manual_seed(1)
    shape = (samples, *EXAMPLES[name].shape)
    if name.endswith("GPT"):
        length = shape[1]
        tokens = torch.randint(0, WORDS, shape, generator=generator)
        ends = torch.randint(2, length, (samples, 1), generator=generator)
        return tokens, tokens.roll(-1, 1).masked_fill(torch.arange(length) >= ends, IGNORE)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name in ("Drops", "Shared"):
        return inputs, torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    of = (samples, *shape[2:]) if name == "UNet" else (samples,)
    return inputs, torch.randint(0, CLASSES, of, generator=generator)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int | Tensor]:
    """The sum of the losses and the count, by tokens and pixels if they have labels."""
    labels = batch[1]
    if output.ndim == 3 and labels.ndim == 1:  # two views of each sample
        first, second = output.unbind(1)
        everyone, start = shoal.gather(second)
        own = torch.arange(start, start + len(first))
        return F.cross_entropy(first @ everyone.T / 0.1, own, reduction="sum"), len(first)
    if labels.is_floating_point():
        return F.mse_loss(output, labels, reduction="sum"), len(output)
    classes = output.movedim(1, -1) if output.ndim == 4 else output
    total = F.cross_entropy(
        classes.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (labels != IGNORE).sum()
