"""The measured memory of random networks is never above the traced one and the margin of shoal plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.measured_memory import measured_peak
from helpers.planned_models import Attention, Built, Residual, classes, convolutions
from helpers.ranks import Ranks
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.search.fit import SMALL_MARGIN, margin_of
from shoal.tools.plan.trace import trace_step
from shoal.tools.plan.work.planned_step import PlannedStep, Recompute

SAMPLES = 32


class Blocks(nn.Module):
    """A stem, repeated blocks, which can be recomputed, and a head over the mean of the features."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], width: int, dims: Any) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)
        self.head, self.dims = nn.Linear(width, 10), dims

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(self.dims) if self.dims else x)
        return scores


class Table(nn.Module):
    """Adds a table that is not trained."""

    table: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Cells(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cells(x)[0]
        return found


def dense(draw: random.Random, depth: int) -> tuple[Callable[[], nn.Module], Tensor]:
    inputs, width = draw.choice((16, 256, 4096)), draw.choice((8, 64, 512))
    act = draw.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh))
    drop = draw.choice((0.0, 0.2))

    def make() -> nn.Module:
        blocks: list[nn.Module] = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), act(), nn.Dropout(drop))
            for _ in range(depth)
        ]
        return Blocks(nn.Linear(inputs, width), blocks, width, None)

    return make, torch.zeros(SAMPLES, inputs)


def attention(draw: random.Random, depth: int) -> tuple[Callable[[], nn.Module], Tensor]:
    length, width = draw.choice((16, 64, 128)), draw.choice((32, 96))
    vocab, drop = draw.choice((50, 1000)), draw.choice((0.0, 0.1))
    causal, table = draw.random() < 0.5, draw.random() < 0.5

    def make() -> nn.Module:
        stem: list[nn.Module] = [nn.Embedding(vocab, width)] + [Table(length, width)] * table
        blocks: list[nn.Module] = [
            Attention(width, 4, causal=causal, dropout=drop) for _ in range(depth)
        ]
        return Blocks(nn.Sequential(*stem), blocks, width, 1)

    return make, torch.arange(SAMPLES * length).reshape(SAMPLES, length) % vocab


def convolution(draw: random.Random, depth: int) -> tuple[Callable[[], nn.Module], Tensor]:
    size, width = draw.choice((16, 32)), draw.choice((8, 16, 32))
    residual = draw.random() < 0.5

    def make() -> nn.Module:
        outputs = 4 * width if residual else width
        stem = nn.Conv2d(3, outputs, 3, padding=1)
        blocks: list[nn.Module] = [
            Residual(outputs, width, 1) if residual else convolutions(width, width)
            for _ in range(depth)
        ]
        return Blocks(stem, blocks, outputs, (2, 3))

    return make, torch.zeros(SAMPLES, 3, size, size)


def recurrent(draw: random.Random, depth: int) -> tuple[Callable[[], nn.Module], Tensor]:
    length, width, vocab = draw.choice((16, 48)), draw.choice((16, 64)), draw.choice((50, 1000))

    def make() -> nn.Module:
        return Blocks(nn.Embedding(vocab, width), [Cells(width) for _ in range(depth)], width, 1)

    return make, torch.arange(SAMPLES * length).reshape(SAMPLES, length) % vocab


KINDS = (dense, attention, convolution, recurrent)


def random_case(draw: random.Random, layout: str) -> tuple[str, Built, PlannedStep]:
    """Return a random model, and a plan with this layout.

    oneDNN has no LSTM in bfloat16 for some CPUs.
    """
    kind = draw.choice(KINDS)
    make, inputs = kind(draw, draw.randint(2, 4))
    degrees = Layout.parse(layout)
    batch = draw.choice((2, 4, 8, 16, 32))
    local = batch // degrees.data_size
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= local <= 4 * size]
    normalizes = any(isinstance(each, nn.BatchNorm2d) for each in make().modules())
    plan = PlannedStep(
        layout=degrees,
        global_batch=batch,
        micro_batch=local if normalizes else draw.choice(sizes),
        recompute=draw.choice(get_args(Recompute)),
        precision="fp32" if kind is recurrent else draw.choice(("fp32", "mixed")),
    )
    return kind.__name__, (make, shoal.Task(classes), (inputs, torch.arange(SAMPLES) % 10)), plan


LAYOUTS = {"replicate=1": 60, "replicate=2": 20, "shard=2": 20}


def measured_case(world: shoal.World, layout: str, number: int, folder: str) -> int:
    _, built, plan = random_case(random.Random(number), layout)
    path = Path(folder) / f"{world.rank}.json"
    return measured_peak(world, partial(tuple, built), plan, path)


def allowed(layout: str, number: int) -> float:
    _, built, plan = random_case(random.Random(number), layout)
    traced = trace_step(lambda: Workload(*built), plan).memory.total
    return float((1 + margin_of(plan.layout)) * traced + SMALL_MARGIN)


@pytest.mark.full
def test_one_process(world: shoal.World, tmp_path: Path) -> None:
    measured = measured_case(world, "replicate=1", 34, str(tmp_path))
    assert measured <= allowed("replicate=1", 34)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hundred_cases(layout: str, tmp_path: Path) -> None:
    above = []
    with Ranks(2 if layout.endswith("2") else 1, layout=layout) as ranks:
        for number in range(LAYOUTS[layout]):
            measured = max(ranks.call(measured_case, layout, number, str(tmp_path)))
            if measured > allowed(layout, number):
                above.append((number, random_case(random.Random(number), layout)[0], measured))
    assert not above
