"""The comparison of a cut model leaves no trace, and ends on all ranks where one of them fails."""

from __future__ import annotations

import itertools
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from helpers.least_squares import pairs, squared_distance
from helpers.one_process import check_like_one
from helpers.ranks import RankError, Ranks
from shoal.util.errors import StepError

pytestmark = pytest.mark.processes
LAYOUT = "pipeline=2"

WIDTH, SAMPLES = 6, 27


class Same(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h


class Doubling(nn.Module):
    """Changes what it is given."""

    def forward(self, h: Tensor) -> Tensor:
        return h.mul_(2)


class Unsqueezing(nn.Module):
    """Changes the shape of what it is given."""

    def forward(self, h: Tensor) -> Tensor:
        return h.unsqueeze_(1).sum(1)


class Viewing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.view(-1, WIDTH)


class Counting(nn.Module):
    """Counts its calls in an attribute."""

    calls: Any = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return h * (1 + self.calls)  # type: ignore[no-any-return]


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, h: Tensor) -> Tensor:
        self.calls.append(1)
        return h * (1 + len(self.calls))


class PlainTensor(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 + self.calls)  # type: ignore[no-any-return]


class NewBuffer(nn.Module):
    """Puts another tensor in the place of its buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return h * (1 + self.calls)


class Decaying(nn.Module):
    """Changes its parameter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.scale.data.mul_(1.1)
        return h * self.scale


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h)  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Draws from generators that are not torch's."""

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + random.random() + float(np.random.random()))


class Failing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        raise ValueError("a broken module")


class Dying(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return h


class Net(nn.Module):
    """Four blocks; the odd module is in front of the one at `place`."""

    def __init__(self, odd: type[nn.Module], place: int) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(odd() if number == place else Same(), nn.Linear(WIDTH, WIDTH))
            for number in range(4)
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x)) + 0.0
        return x

    def between(self, h: Tensor) -> Tensor:
        return h


class FailingOnOneRank(Net):
    """Its own forward fails where it is not traced, on the rank of the last stage alone."""

    def between(self, h: Tensor) -> Tensor:
        if type(h) is Tensor and dist.get_rank() == 1:
            raise ValueError("on one rank")
        return h


def parts(
    world: shoal.World, strategy: str | None, odd: type[nn.Module], place: int, make: type[Net] = Net
) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(make(odd, place), world, None if strategy is None else NAMED[strategy])
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-3), shoal.Task(squared_distance))
    return step, shoal.Loader(pairs(SAMPLES, WIDTH), world, batch_size=8, micro_batches=4)


def log(world: shoal.World, *made: Any) -> tuple[list[float], list[bool]]:
    """The losses of a training, and of each batch whether it is as it was."""
    step, data = parts(world, *made)
    losses, kept = [], []
    for batch in itertools.islice(data.epochs(9), 3):
        before = [micro.value[0].clone() for micro in batch.micros]
        losses.append(step(batch).loss)
        kept += [torch.equal(m.value[0], x) for m, x in zip(batch.micros, before, strict=True)]
    losses.append(shoal.evaluate(step, pairs(SAMPLES, WIDTH), batch_size=8)["loss"])
    return losses, kept


PIPELINE = shoal.Pipeline(split_points=("blocks.2",))
LOOPED = shoal.Pipeline(split_points=("blocks.1", "blocks.2", "blocks.3"), schedule="interleaved")
FOLDED = shoal.Pipeline(split_points=("blocks.1", "blocks.2", "blocks.3"), schedule="zbv")
REMOTE = shoal.RPCPipeline(stages={"front": ("blocks.0", "blocks.1"), "back": ("blocks.2", "blocks.3")})
NAMED: dict[str, Any] = {"pipeline": PIPELINE, "remote": REMOTE, "interleaved": LOOPED, "zbv": FOLDED}
BOTH, ALL = ["pipeline", "remote"], [*NAMED]
KEEPING = [Counting, Listing, PlainTensor, NewBuffer, Spectral, Viewing]
CASES = [
    *((odd, place, strategy) for odd in KEEPING for place in (0, 2) for strategy in ALL),
    *((Drawing, 0, strategy) for strategy in ALL),  # elsewhere from another rank's generators
    *((Decaying, 2, strategy) for strategy in BOTH),  # else while others are in flight
]


def raised(results: list[Any], found: str) -> None:
    for result in results:
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError), result.text
        assert found in result.error.found


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("odd", [Doubling, Unsqueezing])
def test_a_module_that_changes_the_batch_raises_on_all_ranks(
    ranks: Ranks, odd: type[nn.Module], strategy: str
) -> None:
    """In one process the loss would get the changed batch; here it is on another rank."""
    raised(ranks.attempt(log, strategy, odd, 0), "changes a tensor of the batch in place")


def copied(world: shoal.World, strategy: str | None) -> list[float]:
    """Trains a model that changes what `inputs` has made of the batch, and not the batch."""
    step, data = parts(world, strategy, Doubling, 0)
    step.task = shoal.Task(squared_distance, inputs=lambda batch: 3 * batch[0])
    return [step(batch).loss for batch in itertools.islice(data.epochs(9), 3)]


@pytest.mark.parametrize("strategy", BOTH)
def test_a_module_may_change_a_copy_of_the_batch(ranks: Ranks, strategy: str) -> None:
    check_like_one(ranks, copied, strategy, rel=1e-9)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_module_that_fails_raises_on_all_ranks(ranks: Ranks, place: int, strategy: str) -> None:
    raised(ranks.attempt(log, strategy, Failing, place), "ValueError: a broken module")


@pytest.mark.parametrize("strategy", ALL)
def test_a_forward_that_fails_on_one_rank_raises_on_all(ranks: Ranks, strategy: str) -> None:
    raised(ranks.attempt(log, strategy, Same, 0, FailingOnOneRank), "ValueError: on one rank")


@pytest.mark.parametrize("strategy", BOTH)
def test_a_rank_that_dies_in_the_comparison_ends_it_on_the_other(strategy: str) -> None:
    with Ranks(2, layout="pipeline=2") as ranks:
        first, second = ranks.attempt(log, strategy, Dying, 3)
    assert isinstance(first, RankError)
    assert "Error" in first.text
    assert isinstance(second, RankError)
    assert second.text == "rank 1 died"


def test_what_a_module_keeps_is_as_if_it_had_not_been_compared(ranks: Ranks) -> None:
    with shoal.init() as world:
        expected = log(world, None, Counting, 2)
    for losses, kept in ranks.call(log, "pipeline", Counting, 2):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert all(kept)


@pytest.mark.full
@pytest.mark.parametrize(("odd", "place", "strategy"), CASES)
def test_what_modules_keep_or_draw_gives_the_numbers_of_one_process(
    ranks: Ranks, odd: type[nn.Module], place: int, strategy: str
) -> None:
    with shoal.init() as world:
        expected = log(world, None, odd, place)
    for losses, kept in ranks.call(log, strategy, odd, place):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert all(kept)


def in_place(world: shoal.World, strategy: Any) -> list[float]:
    model = shoal.parallelize(Net(Doubling, 0), world, strategy)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=1e-3), shoal.Task(squared_distance))
    values = pairs(SAMPLES, WIDTH)[0][:24].view(3, 8, 1, WIDTH).repeat(1, 1, 4, 1)
    opposites = [(x, -x) for x in values.flatten(0, 1)]
    data = shoal.Loader(opposites, world, batch_size=8, micro_batches=2)
    return [step(batch).loss for batch in data.epochs(1)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("tensor=2", shoal.TensorParallel(plan={"blocks.2.1": "column", "blocks.3.1": "row"})),
        ("context=2", shoal.ContextParallel(modules=("blocks.1", "blocks.2"))),
    ],
)
def test_strategies_with_the_whole_batch_on_each_rank_may_change_it(
    ranks: Ranks, layout: str, strategy: Any
) -> None:
    ranks.divide(layout)
    check_like_one(ranks, in_place, strategy, rel=1e-9)
    ranks.divide("pipeline=2")
