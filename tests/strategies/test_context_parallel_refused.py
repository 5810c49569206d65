"""Context parallelism refuses what would change the numbers, and takes torch's own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.causal_transformer import GPT, texts
from helpers.ranks import RankError, Ranks

LAYOUT = "context=2"
pytestmark = pytest.mark.processes


class Torchs(nn.Module):
    """torch's own layers, with what is to be tried as options."""

    def __init__(self, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, heads, 16, dropout=0.0, batch_first=True).double()
            for _ in range(layers)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **options)
        return x


class Odd(Torchs):
    """Leaves out a unit, or runs the last one first."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Mixing(nn.Module):
    """A unit that mixes positions in a way of its own after a harmless one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8).double(), how
        self.convolution = nn.Conv1d(8, 8, 3, padding=1).double()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "convolution":
            return self.convolution(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        if self.how == "positions":
            return x + torch.arange(x.size(1))[:, None]
        if self.how == "pooling":
            return x - x.mean(1, keepdim=True)
        if self.how == "softmax":
            return (x @ x.transpose(1, 2)).softmax(-1) @ x
        if self.how == "weights":
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]
        if self.how == "other":
            return self.attention(x, x[:, :1], x[:, :1], need_weights=False)[0]  # type: ignore[no-any-return]
        return self.linear(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Mixing, ways))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Pixels(nn.Module):
    """A unit between others of (batch, channels, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x)  # type: ignore[no-any-return]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Pixels(), Pixels())

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Opaque(Mixed):
    def forward(self, x: Tensor) -> Any:
        return {"text": str(self.layers(x))}


MASK = nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64)


def run(
    world: shoal.World,
    make: Callable[..., nn.Module],
    made_of: Any,
    size: Any,
    options: Any,
    units: Sequence[str] | None = None,
) -> Tensor:
    """One forward in training mode, each rank with the same input."""
    world.reseed("weights", by_rank=False)
    strategy = shoal.ContextParallel(modules=units)
    model = shoal.parallelize(make(*made_of), world, [strategy, shoal.DDP(find_unused_parameters=True)])
    world.reseed("data", by_rank=False)
    output = model(torch.randn(*size, dtype=torch.float64), **options)
    assert isinstance(output, Tensor)
    return output.detach()


@pytest.mark.parametrize(
    ("make", "made_of", "size", "options", "words"),
    [
        (Mixed, ("", "convolution"), (3, 12, 8), {}, ["Mixed", "first in layers.1"]),
        (Mixed, ("positions", ""), (3, 12, 8), {}, ["first in layers.0", "outside the units"]),
        (Mixed, ("", "pooling", ""), (3, 12, 8), {}, ["first in layers.1", "modules="]),
        (Mixed, ("softmax", ""), (3, 12, 8), {}, ["first in layers.0", "scaled_dot_product_attention"]),
        (Mixed, ("", "weights"), (3, 12, 8), {}, ["weights of its slice", "need_weights=False"]),
        (Mixed, ("", "other"), (3, 12, 8), {}, ["(3, 2, 1, 4)", "self-attention"]),
        (Mixed, ("", ""), (3, 13, 8), {}, ["length 13 for layers.0", "context=2", "pad them to 14"]),
        (Mixed, ("", ""), (3, 12), {}, ["no output, of shape (batch, length, features)"]),
        (
            Images,
            (),
            (3, 8, 4, 4),
            {},
            ["shoal.ContextParallel() and layers.0", "(3, 8, 4, 4)", "images"],
        ),
        (Opaque, ("", ""), (3, 12, 8), {}, ["returns a dict", "cannot be compared"]),
        (Torchs, (2, 1), (3, 12, 8), {}, ["context=2", "layers.0", "1 heads", "not divisible by 2"]),
        (Torchs, (), (3, 12, 8), {"src_mask": MASK}, ["mask in layers.0", "is_causal=True"]),
        (
            Torchs,
            (),
            (3, 12, 8),
            {"src_key_padding_mask": torch.zeros(3, 12, dtype=torch.bool)},
            ["mask in layers.0", "padding at the end"],
        ),
        (
            Torchs,
            (),
            (12, 12, 8),
            {"src_mask": MASK, "is_causal": True},
            ["shape (12, 12) for layers.0", "batch and sequence both have length 12"],
        ),
        (Odd, ((1, 0),), (3, 12, 8), {}, ["layers.1", "layers.0, where sequences are sliced, did not"]),
        (Odd, ((0,),), (3, 12, 8), {}, ["ended without layers.1", "modules="]),
    ],
)
def test_what_would_change_the_numbers_is_refused_on_all_ranks(
    ranks: Ranks, make: Any, made_of: Any, size: Any, options: Any, words: list[str]
) -> None:
    for found in ranks.attempt(run, make, made_of, size, options):
        assert isinstance(found, RankError)
        assert isinstance(found.error, shoal.StepError | shoal.LayoutError), found.text
        assert all(word in str(found.error) for word in words), found.error


def test_heads_of_keys_too_have_to_be_divided(ranks: Ranks) -> None:
    for found in ranks.attempt(gpt_of, 4, 1):
        assert isinstance(found, RankError)
        assert isinstance(found.error, shoal.LayoutError)
        assert "1 heads for keys and values" in found.error.found


def gpt_of(world: shoal.World, heads: int, pairs: int) -> None:
    model = shoal.parallelize(GPT(heads, pairs), world, shoal.ContextParallel())
    model(texts()[0])


class Towers(nn.Module):
    """Two lists of units, of sequences of different length, and a unit between them that sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Torchs(), Torchs()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.one(x, **options)
        return torch.cat((self.two(x[:, 4:]), x[:, :4].cumsum(1)), 1)


@pytest.mark.parametrize(
    ("make", "samples", "units", "options"),
    [
        (Torchs, 12, None, {}),
        (Torchs, 3, None, {"src_mask": MASK, "is_causal": True}),
        (Torchs, 3, ("",), {"src_mask": MASK, "is_causal": True}),
        (Towers, 3, None, {}),
    ],
)
def test_layers_of_torch_give_the_output_of_one_process(
    ranks: Ranks, make: Callable[[], nn.Module], samples: int, units: Any, options: dict[str, Any]
) -> None:
    with shoal.init() as world:
        expected = run(world, make, (), (samples, 12, 8), options, units)
    for found in ranks.call(run, make, (), (samples, 12, 8), options, units):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
