"""Ten models of different kinds, each with its task and a dataset, whose memory is predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

SAMPLES = 64
Built = tuple[Callable[[], nn.Module], shoal.Task, Any]


def classes(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def values(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), output.numel()


def words(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def labels(count: int = 10) -> Tensor:
    return torch.arange(SAMPLES) % count


class Attention(nn.Module):
    """A pre-norm block of attention and an MLP, with dropout."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.dropout(self.outer(mixed.transpose(1, 2).flatten(2)))
        added: Tensor = self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))
        return x + added


class Transformer(nn.Module):
    def __init__(self, width: int = 192, layers: int = 4, vocab: int = 2000) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Attention(width, 6, causal=True) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList(
            Attention(width, 6, causal=False, dropout=0.1) for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


class Residual(nn.Module):
    """A bottleneck: convolutions of 1, 3 and 1 pixels with BatchNorm, and a skip connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.skip = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.skip(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        *(Residual(32, 32, 1), Residual(128, 32, 1), Residual(128, 64, 2), Residual(256, 64, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
    )


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()),
    )


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList((convolutions(3, width), convolutions(width, 2 * width)))
        self.middle = convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList((convolutions(6 * width, 2 * width), convolutions(3 * width, width)))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, skips.pop()), 1))
        image: Tensor = self.head(x)
        return image


class Spectral(nn.Module):
    """A product with complex weights of the lowest frequencies, and a convolution of one pixel."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft2(x)
        kept = torch.zeros_like(found)
        low = found[..., : self.modes, : self.modes]
        kept[..., : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.local(x))


def fourier() -> nn.Module:
    parts = [Spectral(32, 12) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 32, 1), *parts, nn.Conv2d(32, 3, 1))


class GraphLayer(nn.Module):
    """Messages along edges, added at the nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.update = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        ends = torch.cat((x[:, edges[0]], x[:, edges[1]]), -1)
        sums = torch.zeros_like(x).index_add(1, edges[1], F.relu(self.message(ends)))
        return x + F.relu(self.update(torch.cat((x, sums), -1)))


class Graph(nn.Module):
    def __init__(self, width: int = 64, nodes: int = 100, edges: int = 600) -> None:
        super().__init__()
        self.register_buffer("edges", torch.arange(2 * edges).reshape(2, edges) * 7 % nodes)
        self.encode = nn.Linear(8, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, self.edges)
        scores: Tensor = self.head(x.mean(1))
        return scores


class Tables(nn.Module):
    """Embedding tables and an MLP over their rows, as in recommendation models."""

    def __init__(self, rows: int = 20_000, width: int = 32, tables: int = 6) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        rows = [table(x[:, index]) for index, table in enumerate(self.tables)]
        scores: Tensor = self.top(torch.cat(rows, -1))
        return scores


class Recurrent(nn.Module):
    def __init__(self, width: int = 128, vocab: int = 1000) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.cells = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cells(self.words(x))[0])
        return scores


def dense() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)),
    )


def autoencoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 16 * 16, 64), nn.Linear(64, 64 * 16 * 16)),
        nn.Unflatten(1, (64, 16, 16)),
        *(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ReLU()),
        nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1),
    )


def numbers(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))


def images() -> tuple[Tensor, Tensor]:
    return numbers(3, 64, 64), labels()


def pictures() -> tuple[Tensor, Tensor]:
    pixels = numbers(3, 64, 64)
    return pixels, pixels.clone()


def sentences(vocab: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(SAMPLES * 128).reshape(SAMPLES, 128) % vocab
    return tokens, tokens.clone()


MODELS: dict[str, Callable[[], Built]] = {
    "transformer": lambda: (Transformer, shoal.Task(words), sentences(2000)),
    "ResNet": lambda: (resnet, shoal.Task(classes), images()),
    "U-Net": lambda: (UNet, shoal.Task(values), pictures()),
    "Fourier operator": lambda: (fourier, shoal.Task(values), pictures()),
    "graph": lambda: (Graph, shoal.Task(classes), (numbers(100, 8), labels())),
    "embedding tables": lambda: (
        Tables,
        shoal.Task(classes),
        (torch.arange(SAMPLES * 6).reshape(SAMPLES, 6), labels()),
    ),
    "MLP": lambda: (dense, shoal.Task(classes), (numbers(256), labels())),
    "ViT": lambda: (VisionTransformer, shoal.Task(classes), images()),
    "LSTM": lambda: (Recurrent, shoal.Task(words), sentences(1000)),
    "autoencoder": lambda: (autoencoder, shoal.Task(values), pictures()),
}
