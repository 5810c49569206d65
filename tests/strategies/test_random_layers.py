"""Each random layer and function of torch.nn draws a sample's numbers, in any micro-batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.exact_models import drop_path, stochastic_depth
from helpers.keyed_draws import keyed
from shoal.data.micro import MicroBatch
from shoal.strategies.random_draws.draws import register

SAMPLES, LENGTH, WIDTH = 6, 4, 8
SEQUENCE, IMAGE, VOLUME = (LENGTH, WIDTH), (3, 9, 9), (2, 7, 7, 7)


class Calling(nn.Module):
    """Calls a layer, or a function, with the sample dimension first."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        found = self.call(x)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result


def attending(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


class Attending(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, 0.5, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=self.need_weights)


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.5, batch_first=True), 2
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x, x + 1)
        return found


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x, x + 1)
        return found


class LengthFirst(nn.Module):
    """Runs a layer on tensors of shape (length, samples, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x.transpose(0, 1))
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result.transpose(0, 1)


def drop_block(x: Tensor) -> Tensor:
    """As torchvision writes DropBlock (Ghiasi et al. 2018): the centres of blocks are drawn."""
    noise = torch.empty((len(x), x.shape[1], x.shape[2] - 2, x.shape[3] - 2), dtype=x.dtype)
    noise = F.pad(noise.bernoulli_(0.1), [1, 1, 1, 1])
    return x * (1 - F.max_pool2d(noise, 3, 1, 1))


def drop_patches(x: Tensor) -> Tensor:
    """As timm writes it: each sample keeps other positions."""
    kept = torch.argsort(torch.randn(x.shape[0], x.shape[1]), dim=-1)[:, :2]
    return x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def random_tensor(x: Tensor) -> Tensor:
    """Stochastic depth as EfficientNet's implementations write it."""
    return x / 0.8 * torch.floor(0.8 + torch.rand((len(x), 1, 1), dtype=x.dtype))


def depth_of_batch(x: Tensor) -> Tensor:
    """torchvision's mode="batch": a number for the step."""
    noise = torch.empty([1] * x.ndim, dtype=x.dtype).bernoulli_(0.5)
    return x * noise / 0.5 + torch.rand(x.shape[1:])


RANDOM: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "Dropout": (nn.Dropout(0.5), SEQUENCE),
    "Dropout1d": (nn.Dropout1d(0.5), SEQUENCE),
    "Dropout2d": (nn.Dropout2d(0.5), IMAGE),
    "Dropout3d": (nn.Dropout3d(0.5), VOLUME),
    "AlphaDropout": (nn.AlphaDropout(0.5), SEQUENCE),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.5), SEQUENCE),
    "RReLU": (nn.RReLU(), SEQUENCE),
    "FractionalMaxPool2d": (nn.FractionalMaxPool2d(2, output_ratio=0.6), IMAGE),
    "FractionalMaxPool3d": (nn.FractionalMaxPool3d(2, output_ratio=0.6), VOLUME),
    "MultiheadAttention": (Attending(need_weights=False), SEQUENCE),
    "MultiheadAttention, with weights": (Attending(need_weights=True), SEQUENCE),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5, batch_first=True),
        SEQUENCE,
    ),
    "TransformerEncoder": (
        LengthFirst(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5), 2)),
        SEQUENCE,
    ),
    "TransformerDecoderLayer": (Decoding(), SEQUENCE),
    "TransformerDecoder": (Decoding(), SEQUENCE),
    "Transformer": (Translating(), SEQUENCE),
    "RNN": (nn.RNN(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True), SEQUENCE),
    "LSTM": (nn.LSTM(WIDTH, WIDTH, 3, dropout=0.5, bidirectional=True, batch_first=True), SEQUENCE),
    "GRU": (LengthFirst(nn.GRU(WIDTH, WIDTH, 2, dropout=0.5)), SEQUENCE),
    "dropout": (partial(F.dropout, p=0.5), SEQUENCE),
    "dropout, inplace": (lambda x: F.dropout(x * 1, 0.5, inplace=True), SEQUENCE),
    "dropout1d": (partial(F.dropout1d, p=0.5), SEQUENCE),
    "dropout2d": (partial(F.dropout2d, p=0.5), IMAGE),
    "dropout3d": (partial(F.dropout3d, p=0.5), VOLUME),
    "alpha_dropout": (partial(F.alpha_dropout, p=0.5, training=True), SEQUENCE),
    "feature_alpha_dropout": (partial(F.feature_alpha_dropout, p=0.5, training=True), SEQUENCE),
    "rrelu": (partial(F.rrelu, training=True), SEQUENCE),
    "rrelu_": (lambda x: F.rrelu_(x * 1, training=True), SEQUENCE),
    "gumbel_softmax": (partial(F.gumbel_softmax, hard=True), SEQUENCE),
    "fractional_max_pool2d": (
        partial(F.fractional_max_pool2d, kernel_size=2, output_size=4),
        IMAGE,
    ),
    "fractional_max_pool2d_with_indices": (
        partial(F.fractional_max_pool2d_with_indices, kernel_size=[2, 2], output_size=[4, 4]),
        IMAGE,
    ),
    "fractional_max_pool3d": (
        partial(F.fractional_max_pool3d, kernel_size=2, output_size=3),
        VOLUME,
    ),
    "fractional_max_pool3d_with_indices": (
        partial(F.fractional_max_pool3d_with_indices, kernel_size=[2, 2, 2], output_size=[3, 3, 3]),
        VOLUME,
    ),
    "scaled_dot_product_attention": (attending, SEQUENCE),
    "multi_head_attention_forward": (Attending(need_weights=True), SEQUENCE),
    "stochastic depth, torchvision": (lambda x: stochastic_depth(x, 0.5, True), SEQUENCE),
    "stochastic depth of the batch, torchvision": (depth_of_batch, SEQUENCE),
    "stochastic depth, timm": (lambda x: drop_path(x, 0.5, True), SEQUENCE),
    "stochastic depth, EfficientNet": (random_tensor, SEQUENCE),
    "DropBlock": (drop_block, IMAGE),
    "dropped patches": (drop_patches, SEQUENCE),
}
"""Each draws in training mode, for samples of a shape."""

DRAWS = re.compile(r"dropout|\brand|rrelu|gumbel|_random_samples|bernoulli|multinomial|noise")
"""A word in the source of a layer or a function that draws."""
OTHERS = {"RNNBase": "of RNN, LSTM and GRU", "ctc_loss": "an example", "embedding_bag": "an example"}


@pytest.mark.parametrize("name", RANDOM)
def test_the_same_numbers_in_any_micro_batch(name: str) -> None:
    call, shape = RANDOM[name]
    model = Calling(call).double()
    register(model)
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, *shape, dtype=torch.float64)

    def run(first: int, stop: int, epoch: int = 0) -> Tensor:
        micro = MicroBatch(None, first + 100 * epoch, stop - first, 1.0, batch_first=100 * epoch)
        found: Tensor = keyed(lambda: model(x[first:stop]), micro)
        return found.detach()

    parts = [run(first, stop) for first, stop in ((0, 3), (3, 5), (5, 6))]  # which show the layout
    complete = run(0, SAMPLES)
    again = [run(first, stop) for first, stop in ((0, 3), (3, 5), (5, 6))]
    torch.testing.assert_close(torch.cat(again), complete, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(parts), complete, rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(complete, run(0, SAMPLES, epoch)) for epoch in (1, 2, 3))


def test_every_random_layer_of_torch_is_in_the_table() -> None:
    layers = {name: getattr(nn, name) for name in nn.modules.__all__}
    functions = {name: each for name, each in vars(F).items() if inspect.isfunction(each)}
    drawing = {
        name
        for name, each in (layers | functions).items()
        if not name.startswith("_") and DRAWS.search(code_of(each))
    }
    assert drawing - RANDOM.keys() - OTHERS.keys() == set()


def code_of(each: Any) -> str:
    """Its source without documentation."""
    own = [each, *(vars(each).get(name) for name in ("__init__", "forward", "_forward_impl"))]
    found = ""
    for function in filter(inspect.isfunction, own):
        with suppress(OSError):  # generated
            found += inspect.getsource(function).replace(function.__doc__ or "\0", "")
    return found
