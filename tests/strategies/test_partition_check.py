"""A cut model is compared with the whole one on its first batch, in every layout and mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.least_squares import pairs, squared_distance
from helpers.ranks import RankError, Ranks
from shoal.util.errors import StepError

pytestmark = [pytest.mark.processes, pytest.mark.full]
LAYOUT = "pipeline=2"

WIDTH, SAMPLES = 8, 64
NOT_WHOLE = "the split model differs from the original model: "


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, layout="pipeline=3", seed=0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, layout="replicate=2,pipeline=2", seed=0) as ranks:
        yield ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.narrow(torch.relu(self.wide(h)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(self.between(h))
        return self.head(self.norm(h) * self.scale)  # type: ignore[no-any-return]

    def between(self, h: Tensor) -> Tensor:
        return h


class Exact(Net):
    """The class of what a forward computes is not that of what it is traced with."""

    def between(self, h: Tensor) -> Tensor:
        return 2 * h if type(h) is Tensor else h


class Dropping(Net):
    """Draws in training, in modules of both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.5)) for block in self.blocks)


class Noisy(Net):
    """Draws in its own forward, also in evaluation."""

    def between(self, h: Tensor) -> Tensor:
        return h + torch.rand_like(h)


class Inner(Noisy):
    """Draws between its blocks, which are split: in one process the numbers belong to this module."""


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class Masked(Net):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        return super().forward(2 * x if mask is None else x)


class Beginning(Net):
    """Its forward uses again what a module has been given."""

    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=self.in_place)
        self.entry = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.entry(x)
        again = self.relu(h)
        return super().forward(again + (h if self.in_place else again))


class InPlace(Beginning):
    """The module works in place, so the forward uses what it made of it."""

    in_place = True


class Sums(nn.Module):
    """Returns what can't be sent."""

    def forward(self, h: Tensor) -> Any:
        return lambda: h + 1


class Opaque(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(super().forward(x))()  # type: ignore[no-any-return]


def parts(
    world: shoal.World, strategy: Any, make: Any, precision: Any = "fp32"
) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(make, world, strategy, statistics="rank")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(squared_distance), precision=precision)
    return step, shoal.Loader(pairs(SAMPLES, WIDTH), world, batch_size=16, micro_batches=4)


def log(world: shoal.World, strategy: Any, make: Any, precision: Any = "fp32") -> list[float]:
    step, data = parts(world, strategy, make, precision)
    return [step(batch).loss for batch in itertools.islice(data.epochs(9), 3)]


PIPELINE = shoal.Pipeline(split_points=("blocks.1",))
STAGES = {"front": ("first", "blocks.0"), "back": ("blocks.1", "blocks.2", "norm", "head")}
REMOTE = shoal.RPCPipeline(stages=STAGES)
SPREAD = shoal.RPCPipeline(stages=STAGES, workers={"front": (0,), "back": (1, 2)})
TENSOR = [shoal.TensorParallel(plan={"blocks.*.wide": "column", "blocks.*.narrow": "row"}), PIPELINE]
BOTH = [pytest.param(PIPELINE, id="pipeline"), pytest.param(REMOTE, id="remote")]


def refused(results: list[Any], found: str) -> None:
    for result in results:
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError)
        assert found in str(result.error)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("replicate=2,pipeline=2", PIPELINE),
        ("replicate=2,pipeline=2", REMOTE),
        ("shard=2,pipeline=2", PIPELINE),
        pytest.param("tensor=2,pipeline=2", TENSOR, marks=pytest.mark.long),
        ("pipeline=4", shoal.Pipeline(split_points=("blocks.0", "blocks.1", "blocks.2"))),
    ],
)
@pytest.mark.parametrize("made", ["given", pytest.param("constructed", marks=pytest.mark.long)])
def test_a_difference_is_found_in_every_layout(
    four: Ranks, layout: str, strategy: Any, made: str
) -> None:
    four.divide(layout)
    exact = Exact if made == "constructed" else Exact()
    refused(four.attempt(log, strategy, exact), f"{NOT_WHOLE}the input of blocks.0 differs")
    four.call(log, strategy, Net if made == "constructed" else Net())


def test_a_difference_is_found_where_several_ranks_share_a_stage(three: Ranks) -> None:
    refused(three.attempt(log, SPREAD, Exact), f"{NOT_WHOLE}the input of blocks.0 differs")
    three.call(log, SPREAD, Net)


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [Dropping, Noisy])
def test_what_draws_is_the_whole_model_too(
    ranks: Ranks, make: type[Net], precision: str, strategy: Any
) -> None:
    """Both runs draw the same numbers, in training as in evaluation, wherever a module is."""
    ranks.call(log, strategy, make, precision)


def test_draws_in_the_forward_of_a_module_that_is_split_are_refused(ranks: Ranks) -> None:
    strategy = shoal.Pipeline(split_points=("inner.blocks.1",))
    refused(ranks.attempt(log, strategy, Outer), f"{NOT_WHOLE}the input of inner.blocks.0 differs")


def test_modules_that_work_in_place_are_the_whole_model_too(ranks: Ranks) -> None:
    """A tensor changes on all ranks that have it."""
    assert ranks.call(log, PIPELINE, InPlace) == ranks.call(log, PIPELINE, Beginning)


def halves(world: shoal.World) -> list[float]:
    model = Net().half()
    engine = shoal.parallelize(model, world, PIPELINE, statistics="rank")
    task = shoal.Task(squared_distance, inputs=lambda batch: batch[0].half())
    step = shoal.Step(engine, torch.optim.SGD(engine.parameters(), lr=1e-4), task)
    data = shoal.Loader(pairs(SAMPLES, WIDTH), world, batch_size=16, micro_batches=4)
    return [step(batch).loss for batch in itertools.islice(data.epochs(9), 3)]


def test_a_model_of_16_bits_is_the_whole_one(ranks: Ranks) -> None:
    ranks.call(halves)


def trained(world: shoal.World, strategy: Any, directory: Path, steps: int) -> list[Tensor]:
    step, data = parts(world, strategy, Dropping)
    with shoal.Run(directory, step, data) as run:
        run.restore()
        for batch in data.epochs(9):
            step(batch)
            run.tick()
            if step.number == steps:
                break
        run.save()
    return [tensor.clone() for tensor in step.model.state_dict().values()]


@pytest.mark.parametrize("strategy", BOTH)
def test_the_comparison_leaves_no_trace(ranks: Ranks, strategy: Any, tmp_path: Path) -> None:
    """A run that resumes compares again, and ends bit-equal: buffers and dropout included."""
    whole = ranks.call(trained, strategy, tmp_path / "whole", 4)
    ranks.call(trained, strategy, tmp_path / "cut", 2)
    for found, expected in zip(ranks.call(trained, strategy, tmp_path / "cut", 4), whole, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def masked(world: shoal.World, strategy: Any) -> tuple[list[float], str]:
    """Two batches with a mask, then one without."""
    model = shoal.parallelize(Masked, world, strategy, statistics="rank")
    task = shoal.Task(squared_distance, inputs=lambda batch: (batch[0], batch[2][0]))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-2), task)
    samples = [(*pair, index) for index, pair in enumerate(zip(*pairs(SAMPLES, WIDTH), strict=True))]

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        values, labels, numbers = zip(*rows, strict=True)
        mask = None if step.number == 2 else torch.ones(1)
        return torch.stack(values), torch.stack(labels), [mask] * len(numbers)

    data = shoal.Loader(samples, world, batch_size=16, micro_batches=4, collate_fn=collate)
    losses: list[float] = []
    for batch in data.epochs(1):
        try:
            losses.append(step(batch).loss)
        except StepError as error:
            return losses, str(error)
    return losses, ""


@pytest.mark.parametrize("strategy", BOTH)
def test_a_batch_of_another_structure_is_compared_anew(ranks: Ranks, strategy: Any) -> None:
    for losses, error in ranks.call(masked, strategy):
        assert len(losses) == 2
        assert f"{NOT_WHOLE}the input of first differs" in error


def said(world: shoal.World, strategy: Any, make: Any) -> list[str]:
    lines: list[str] = []
    say = world.print
    world.print = lambda *parts: lines.append(" ".join(map(str, parts)))  # type: ignore[method-assign]
    try:
        log(world, strategy, make)
    finally:
        world.print = say  # type: ignore[method-assign]
    return lines


NOT_COMPARED = "cannot be compared with the original model: a module returns"


def test_what_cannot_be_compared_is_said(ranks: Ranks) -> None:
    for lines in ranks.call(said, PIPELINE, Opaque):
        assert any(NOT_COMPARED in line for line in lines)


class Words(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.words(x.long() % 16).mean(1)))  # type: ignore[no-any-return]


def test_results_of_sharded_layers_are_compared() -> None:
    plan = {"words": "vocabulary"}
    with Ranks(4, layout="tensor=2,pipeline=2", seed=0) as ranks:
        for lines in ranks.call(said, [shoal.TensorParallel(plan=plan), PIPELINE], Words):
            assert not any(NOT_COMPARED in line for line in lines)
