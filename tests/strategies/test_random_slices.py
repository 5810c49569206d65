"""Random draws of models whose activations are split over ranks: tensor and context parallelism."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shoal
from helpers.one_process import check_refused
from helpers.ranks import Ranks
from helpers.reference import take_custom_step

pytestmark = pytest.mark.processes

WIDTH, SAMPLES = 4, 12
PLAN = {"wide": "column", "narrow": "row"}
SHARDED, SLICED = shoal.TensorParallel(plan=PLAN), shoal.ContextParallel(modules=("",))


@pytest.fixture(scope="module")
def split() -> Iterator[Callable[[Any], Ranks]]:
    """Two ranks with the layout of a strategy."""
    with Ranks(2, layout="tensor=2", seed=3) as started:
        axes = ["tensor"]

        def ranks(strategy: Any) -> Ranks:
            axis = "context" if "context" in strategy.axes else "tensor"
            if axes != [axis]:
                started.divide(f"{axis}=2")
                axes[:] = [axis]
            return started

        yield ranks


class FeedForward(nn.Module):
    """Dropout between and after two layers.

    The first acts on positions and features: with `flat` in one dimension, of which that one is the
    outer one.
    """

    def __init__(self, *, flat: int = 0) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.last, self.flat = nn.Dropout(0.3), nn.Dropout(0.3), flat

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        if self.flat:
            ordered = wide.transpose(1, self.flat)
            dropped = self.drop(ordered.flatten(1)).view(ordered.shape).transpose(1, self.flat)
        else:
            dropped = self.drop(wide)
        found: Tensor = self.last(self.last(self.narrow(dropped)))
        return found


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[0], reduction="sum"), len(output)


def train(
    world: shoal.World,
    strategy: Any = None,
    length: int = 4,
    flat: int = 0,
    frozen: int = 0,
    custom: bool = False,
) -> tuple[list[float], str]:
    """Losses, and the lines of rank 0. One dropout is in eval mode in the first `frozen` steps."""
    torch.manual_seed(2)
    model = shoal.parallelize(FeedForward(flat=flat).double(), world, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None if custom else shoal.Step(model, optimizer, shoal.Task(loss))
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(SAMPLES, length, WIDTH, generator=generator, dtype=torch.float64),)
    losses, printed = [], io.StringIO()
    with contextlib.redirect_stdout(printed):
        loader = shoal.Loader(data, world, batch_size=4)
        for number, batch in enumerate(itertools.islice(loader.epochs(9), 4)):
            model.drop.train(number >= frozen)
            taken = step(batch) if step else take_custom_step(model, optimizer, batch, loss)
            losses.append(taken.loss)
    return losses, printed.getvalue()


Split = Callable[[Any], Ranks]


@pytest.mark.parametrize("strategy", [SHARDED, SLICED], ids=["tensor", "context"])
def test_layers_that_are_unfrozen_later_draw_their_slices(split: Split, strategy: Any) -> None:
    with shoal.init(seed=3) as world:
        alone, _ = train(world, frozen=2)
    for losses, printed in split(strategy).call(train, strategy, 4, 0, 2):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert "random numbers" not in printed


def test_a_custom_loop_draws_the_slices_of_sequences(split: Split) -> None:
    with shoal.init(seed=3) as world:
        alone, _ = train(world, custom=True)
    for losses, printed in split(SLICED).call(train, SLICED, 4, 0, 0, True):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert "random numbers" not in printed


class Sampled(FeedForward):
    """Draws in eval mode too, as Monte Carlo dropout does."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.narrow(F.dropout(self.wide(x), 0.3, training=True))
        return found


def printed_of(world: shoal.World, strategy: Any, kind: str) -> str:
    """The lines of rank 0 in two steps: in eval mode, or in a custom loop."""
    model = (Sampled() if kind == "eval" else FeedForward()).train(kind != "eval")
    model = shoal.parallelize(model, world, strategy)
    optimizer, printed = torch.optim.SGD(model.parameters(), lr=0.1), io.StringIO()
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    with contextlib.redirect_stdout(printed):
        for batch in shoal.Loader((torch.ones(8, 4, WIDTH),), world, batch_size=4).epochs(1):
            if kind == "custom loop":
                take_custom_step(model, optimizer, batch, loss)
            else:
                step(batch)
    return printed.getvalue()


UNCHECKED = shoal.ContextParallel(modules=("",), check=False)


@pytest.mark.parametrize(
    ("strategy", "kind", "names"),
    [
        (SHARDED, "eval", "the model"),
        (SHARDED, "custom loop", "drop, last"),
        (SLICED, "eval", "the model"),
        (UNCHECKED, "step", "drop, last"),
    ],
)
def test_layers_that_draw_by_rank_are_printed_once(
    split: Split, strategy: Any, kind: str, names: str
) -> None:
    line = f"shoal: each rank draws its own random numbers in {names}\n"
    assert split(strategy).call(printed_of, strategy, kind) == [line, ""]


def originals_run(world: shoal.World, p: float) -> int:
    """How often the layers run with full parameters in training mode, if a dropout changes its mode."""
    model = FeedForward()
    model.drop.p = model.last.p = p
    model = shoal.parallelize(model, world, SHARDED)
    called: list[bool] = []
    model.narrow.register_forward_pre_hook(
        lambda layer, _: called.append(layer.training and not isinstance(layer.weight, DTensor))
    )
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    batches = shoal.Loader((torch.ones(4, 3, WIDTH),), world, batch_size=4).epochs(3)
    for batch, trains in zip(batches, (True, False, True), strict=True):
        model.drop.train(trains)
        step(batch)
    return sum(called)


@pytest.mark.parametrize(("p", "times"), [(0.3, 4), (0.0, 0)])
def test_the_original_model_runs_only_for_new_draws(split: Split, p: float, times: int) -> None:
    assert split(SHARDED).call(originals_run, p) == [times, times]


@pytest.mark.parametrize(
    ("strategy", "flat", "found"),
    [(SHARDED, 1, "the input of narrow differs"), (SLICED, 2, "its output differs by")],
    ids=["tensor", "context"],
)
def test_a_slice_that_is_not_contiguous_is_printed(
    split: Split, strategy: Any, flat: int, found: str
) -> None:
    first, second = split(strategy).call(train, strategy, 4, flat)
    assert f"shoal: each rank draws its own random numbers: {found}" in first[1]
    assert second[1] == ""
    assert first[0] == second[0]


@pytest.mark.parametrize("length", [1, 3], ids=["empty", "unequal"])
def test_parts_of_a_sequence_have_their_numbers(split: Split, length: int) -> None:
    with shoal.init(seed=3) as world:
        alone, _ = train(world, length=length)
    strategy = shoal.TensorParallel(plan={**PLAN, "last": "sequence"})
    for losses, printed in split(strategy).call(train, strategy, length):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert "random numbers" not in printed


class Stages(nn.Module):
    """Layers of a plan in two stages, with noise outside of all modules in both.

    `between` is what acts on the features of a rank.
    """

    def __init__(self, between: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(flat=int(between == "flat")) for _ in range(2))
        if between == "softmax":
            self.blocks[1].drop = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + 0.1 * torch.rand_like(x)
        return x


def stages_trained(world: shoal.World, between: str) -> tuple[list[float], str]:
    """Losses, and the lines that a rank prints."""
    torch.manual_seed(2)
    plan = {f"blocks.*.{name}": kind for name, kind in PLAN.items()}
    strategy: Any = [shoal.TensorParallel(plan=plan), shoal.Pipeline(split_points=("blocks.1",))]
    model = shoal.parallelize(Stages(between).double(), world, strategy if world.size > 1 else None)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    generator, printed = torch.Generator().manual_seed(0), io.StringIO()
    data = (torch.randn(SAMPLES, 3, WIDTH, generator=generator, dtype=torch.float64),)
    with contextlib.redirect_stdout(printed):
        loader = shoal.Loader(data, world, batch_size=5, micro_batches=2)
        losses = [step(batch).loss for batch in itertools.islice(loader.epochs(9), 4)]
    return losses, printed.getvalue()


@pytest.mark.full
def test_stages_draw_their_slices_also_after_a_refused_model() -> None:
    with shoal.init(seed=3) as world:
        alone, _ = stages_trained(world, "")
    with Ranks(4, layout="pipeline=2,tensor=2", seed=3) as four:
        check_refused(four, "the input of blocks.1.narrow differs", stages_trained, "softmax")
        for losses, printed in four.call(stages_trained, ""):
            assert losses == pytest.approx(alone, rel=1e-12)
            assert "random numbers" not in printed
        printed = [lines for _, lines in four.call(stages_trained, "flat")]
        assert "own random numbers: the input of blocks.0.narrow differs" in printed[0]
        assert printed[1:] == ["", "", ""]
