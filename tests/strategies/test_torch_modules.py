"""Every module of torch.nn with state or random numbers: the same losses at any split, or a line."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks

SAMPLES = 22


class ModuleCase(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Callable[[Any, Tensor], Any] = lambda layer, x: layer(x)
    printed: bool = False
    micro_batches: bool = True
    """Whether a global batch may be cut into micro-batches."""


def attention(layer: Any, x: Tensor) -> Any:
    return layer(x, x, x)[0]


def both(layer: Any, x: Tensor) -> Any:
    return layer(x, x.flip(1))


def recurrent(layer: Any, x: Tensor) -> Any:
    return layer(x)[0]


def made(kind: str, *arguments: Any, **named: Any) -> Callable[[], nn.Module]:
    return partial(getattr(nn, kind), *arguments, **named)


TRANSFORMER: dict[str, Any] = {"dim_feedforward": 8, "dropout": 0.2, "batch_first": True}
SEQUENCE = (5, 4)

CASES = {
    "Dropout": ModuleCase(lambda: nn.Dropout(0.3), (8,)),
    "Dropout1d": ModuleCase(lambda: nn.Dropout1d(0.3), (4, 6)),
    "Dropout2d": ModuleCase(lambda: nn.Dropout2d(0.3), (4, 3, 3)),
    "Dropout3d": ModuleCase(lambda: nn.Dropout3d(0.3), (4, 2, 2, 2)),
    "AlphaDropout": ModuleCase(lambda: nn.AlphaDropout(0.3), (8,)),
    "FeatureAlphaDropout": ModuleCase(lambda: nn.FeatureAlphaDropout(0.3), (4, 6)),
    "RReLU": ModuleCase(nn.RReLU, (8,)),
    "FractionalMaxPool2d": ModuleCase(lambda: nn.FractionalMaxPool2d(2, output_size=3), (2, 7, 7)),
    "FractionalMaxPool3d": ModuleCase(lambda: nn.FractionalMaxPool3d(2, output_size=2), (2, 5, 5, 5)),
    "MultiheadAttention": ModuleCase(
        lambda: nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True), SEQUENCE, attention
    ),
    "TransformerEncoderLayer": ModuleCase(
        lambda: nn.TransformerEncoderLayer(4, 2, **TRANSFORMER), SEQUENCE
    ),
    "TransformerEncoder": ModuleCase(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, **TRANSFORMER), 2), SEQUENCE
    ),
    "TransformerDecoderLayer": ModuleCase(
        lambda: nn.TransformerDecoderLayer(4, 2, **TRANSFORMER), SEQUENCE, both
    ),
    "TransformerDecoder": ModuleCase(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, **TRANSFORMER), 2),
        SEQUENCE,
        both,
    ),
    "Transformer": ModuleCase(lambda: nn.Transformer(4, 2, 1, 1, **TRANSFORMER), SEQUENCE, both),
    **{
        kind: ModuleCase(
            made(kind, 4, 4, 2, dropout=0.3, batch_first=True),
            SEQUENCE,
            recurrent,
        )
        for kind in ("RNN", "LSTM", "GRU")
    },
    **{
        kind: ModuleCase(made(kind, 4), (4, *[3] * dims), micro_batches=False)
        for kind, dims in (
            ("BatchNorm1d", 1),
            ("BatchNorm2d", 2),
            ("BatchNorm3d", 3),
            ("SyncBatchNorm", 1),
        )
    },
    **{
        f"InstanceNorm{dims}d": ModuleCase(
            made(f"InstanceNorm{dims}d", 4, track_running_stats=True),
            (4, *[3] * dims),
            printed=True,
        )
        for dims in (1, 2, 3)
    },
}
LEFT = {
    "RNNBase": "the base of recurrent layers",
    **{f"Lazy{kind}": "parallelize refuses it" for kind in CASES if "Norm" in kind and kind[0] != "S"},
}
"""Modules that the list below finds too, with the reasons why they are not trained."""


def test_the_list_is_complete() -> None:
    """Losses are left out: their only buffers are weights that the user gives."""
    words = ("register_buffer", "dropout", "rrelu", "_random_samples", "track_running_stats")
    found = set()
    for name, kind in vars(nn).items():
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and "Loss" not in name:
            bases = [base for base in kind.__mro__ if issubclass(base, nn.Module)]
            source = "".join(inspect.getsource(base) for base in bases if base is not nn.Module)
            if any(word in source for word in words):
                found.add(name)
    assert found - CASES.keys() - LEFT.keys() == set()


class Net(nn.Module):
    def __init__(self, case: ModuleCase) -> None:
        super().__init__()
        self.case = case
        self.scale = nn.Parameter(torch.ones(case.shape))
        self.layer = case.make()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.case.call(self.layer, x * self.scale).flatten(1).square().sum(1)
        return found


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - 1).square().sum(), len(output)


def train(
    world: shoal.World, name: str, micro_batches: int = 1, strategy: Any = None
) -> tuple[list[float], str]:
    """Losses of two epochs, and what was printed."""
    torch.manual_seed(0)
    case = CASES[name]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = shoal.parallelize(Net(case).double(), world, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: batch[0]))
        data = torch.randn(SAMPLES, *case.shape, generator=torch.Generator().manual_seed(1)).double()
        loader = shoal.Loader((data,), world, batch_size=7, micro_batches=micro_batches)
        losses = [float(step(batch).loss) for batch in loader.epochs(2)]
    return losses, printed.getvalue()


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Ranks]]:
    with (
        Ranks(2, layout="replicate=-1", seed=3) as ddp,
        Ranks(3, layout="shard=-1", seed=3) as fsdp,
    ):
        yield {"ddp": ddp, "fsdp": fsdp}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_no_difference_is_silent(started: dict[str, Ranks], name: str) -> None:
    cuts = CASES[name].micro_batches
    with shoal.init(seed=3) as world:
        alone, _ = train(world, name)
        others = [train(world, name, 3)] if cuts else []
    unused = shoal.DDP(find_unused_parameters=True)
    others.append(started["ddp"].call(train, name, 1, unused)[0])
    others.append(started["fsdp"].call(train, name, 2 if cuts else 1, shoal.FSDP())[0])
    for losses, printed in others:
        told = "how the batch is split" in printed
        assert told == CASES[name].printed, printed
        assert told or losses == pytest.approx(alone, rel=1e-9)
