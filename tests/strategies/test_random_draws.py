"""The random numbers of modules belong to samples: the same at any split of the same batches."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.exact_models import LENGTH, WIDTH, Drops
from helpers.keyed_draws import draw, keyed
from helpers.ranks import Ranks, several_ranks
from shoal.data.micro import MicroBatch
from shoal.strategies.random_draws.draws import register
from shoal.strategies.random_draws.layouts import Layouts
from shoal.strategies.random_draws.row_index import BatchRows
from shoal.training import run_state

SAMPLES, STEPS = 29, 6


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((SAMPLES, LENGTH, WIDTH), (SAMPLES, 1))
    inputs, targets = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return inputs, targets


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(output)


def train(
    world: shoal.World,
    strategy: Any = None,
    micro_batches: int = 1,
    kind: Callable[[], nn.Module] = Drops,
    batch_size: int = 10,
    random: str = "samples",
) -> list[float]:
    torch.manual_seed(2)
    model = shoal.parallelize(kind().double(), world, strategy, random=random)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(dataset(), world, batch_size=batch_size, micro_batches=micro_batches)
    taken = [step(batch) for batch in itertools.islice(loader.epochs(9), STEPS)]
    return [each for one in taken for each in (one.loss, one.norm)]


UNITS = ["blocks.*", "attention", "drops.*"]
RECOMPUTED = [shoal.ActivationCheckpointing(modules=UNITS), shoal.DDP()]


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int, str], Ranks]]:
    with several_ranks(seed=3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone() -> list[float]:
    with shoal.init(seed=3) as world:
        return train(world)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "micro_batches"),
    [
        (1, "replicate=-1", None, 3),
        (2, "replicate=-1", None, 1),
        (3, "replicate=-1", None, 2),
        (2, "replicate=-1", RECOMPUTED, 1),
        pytest.param(2, "shard=-1", shoal.FSDP(), 2, marks=FULL),
        pytest.param(4, "replicate=2,shard=2", shoal.FSDP(), 1, marks=pytest.mark.long),
        pytest.param(3, "shard=-1", [RECOMPUTED[0], shoal.FSDP()], 2, marks=FULL),
        pytest.param(4, "replicate=-1", None, 1, marks=pytest.mark.long),
        pytest.param(1, "replicate=-1", RECOMPUTED, 5, marks=FULL),
    ],
)
@pytest.mark.processes
def test_the_split_changes_no_number(
    started: Callable[[int, str], Ranks],
    alone: list[float],
    size: int,
    layout: str,
    strategy: Any,
    micro_batches: int,
) -> None:
    for found in started(size, layout).call(train, strategy, micro_batches):
        assert found == pytest.approx(alone, rel=1e-9)


def test_without_keys_the_split_does_change_them() -> None:
    with shoal.init(seed=3) as world:
        ours = train(world, random="ranks")
    with shoal.init(seed=3) as world:
        assert train(world, None, 3, random="ranks") != pytest.approx(ours, rel=1e-3)


class TwoViews(nn.Module):
    """Two forward passes with different masks of the same samples (Gao et al. 2021, SimCSE)."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.layer(self.drop(x)).mean(1) for _ in range(2))
        difference: Tensor = first - second
        return difference.square()


@pytest.mark.processes
def test_two_forward_passes_draw_two_masks(started: Callable[[int, str], Ranks]) -> None:
    with shoal.init(seed=3) as world:
        alone = train(world, kind=TwoViews)
    for found in started(2, "replicate=-1").call(train, None, 2, TwoViews):
        assert found == pytest.approx(alone, rel=1e-9)
    drop = nn.Dropout(0.5)
    register(drop)
    micro = MicroBatch(None, 0, 4, 1.0)
    assert not torch.equal(*keyed(lambda: (drop(torch.ones(4, 9)), drop(torch.ones(4, 9))), micro))


def own_loop(world: shoal.World, micro_batches: int, strategy: Any = None) -> list[float]:
    torch.manual_seed(2)
    model = shoal.parallelize(Drops().double(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = shoal.Loader(dataset(), world, batch_size=10, micro_batches=micro_batches)
    found = []
    for batch in itertools.islice(loader.epochs(9), STEPS):
        for x, y in batch:
            batch.backward(total=F.mse_loss(model(x), y, reduction="sum"), count=len(y))
        found.append(batch.finish(model, clip=1.0).loss)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.processes
def test_a_custom_loop_draws_what_a_step_draws(
    started: Callable[[int, str], Ranks], alone: list[float]
) -> None:
    # Of 4, 3 and 3 samples, none of which is the length of a sequence: no Task shows the layouts.
    for found in started(3, "replicate=-1").call(own_loop, 1):
        assert found == pytest.approx(alone[::2], rel=1e-9)


def test_a_custom_loop_recomputes_its_draws(alone: list[float]) -> None:
    with shoal.init(seed=3) as world:
        assert own_loop(world, 1, RECOMPUTED) == pytest.approx(alone[::2], rel=1e-9)


def resumed(world: shoal.World, directory: str, steps: int) -> list[float]:
    torch.manual_seed(2)
    model = shoal.parallelize(Drops().double(), world)
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shoal.Task(loss), clip=1.0)
    loader = shoal.Loader(dataset(), world, batch_size=10)
    losses = []
    with shoal.Run(directory, step, loader) as run:
        run.restore()
        for batch in loader.epochs(9):
            losses.append(step(batch).loss)
            run.tick()
            if step.number == steps:
                run.save()
                return losses
    return losses


@pytest.mark.processes
def test_a_resumed_run_draws_the_same(
    started: Callable[[int, str], Ranks], alone: list[float], tmp_path: Path
) -> None:
    begun = started(3, "replicate=-1").call(resumed, str(tmp_path), 2)[0]
    rest = started(2, "replicate=-1").call(resumed, str(tmp_path), STEPS)[0]
    assert begun + rest == pytest.approx(alone[::2], rel=1e-9)


def test_a_checkpoint_of_another_format_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):  # formats
        monkeypatch.setattr(run_state, "FORMAT", number)
        with shoal.init(seed=3) as world:
            resumed(world, str(tmp_path), 2)
        assert (
            capsys.readouterr().out.count("dropout continues with those of this version") == number - 1
        )


def test_a_generator_of_the_user_draws_itself() -> None:
    def function() -> Tensor:
        return torch.rand(64, 3, generator=torch.Generator().manual_seed(1))

    assert torch.equal(draw(function), function())
    assert torch.equal(draw(function, first=9), function())


def test_layouts_are_learned_from_several_sizes() -> None:
    known = Layouts()

    def fit(site: str, shape: tuple[int, ...], samples: int) -> tuple[int, int] | None:
        return known.fit(site, shape, BatchRows(None, samples))

    assert fit("a", (8, 8, 3), 8) == (0, 1)  # ambiguous: the first dimension that fits
    assert fit("a", (8, 4, 3), 4) == (1, 1)  # not any more: (length, samples, width)
    assert fit("a", (8, 8, 3), 8) == (1, 1)
    assert fit("b", (64, 8, 8), 8) == (1, 1)  # samples * heads, or (length, samples, …)
    assert fit("b", (32, 8, 8), 4) == (0, 8)
    assert fit("b", (64, 8, 8), 8) == (0, 8)
    assert fit("c", (7,), 4) is None
    assert fit("d", (8, 3), 4) == (0, 2)
    assert fit("d", (8, 3), 2) is None  # the same shape: it counts no samples
    assert fit("d", (8, 3), 4) is None
    assert known.fit("e", (6, 8), BatchRows(torch.zeros(2, 3), 2)) == (0, 3)  # samples * length
    assert known.fit("e", (6, 8), BatchRows(torch.zeros(1, 6), 1)) == (0, 6)  # of twice the length
    assert list(known.unknown.take_lines("")) == []


@pytest.mark.full
def test_a_model_after_all_others_were_deleted() -> None:
    program = """
import gc, torch, shoal
with shoal.init(device="cpu") as world:
    for _ in range(2):
        model = shoal.parallelize(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()), world)
        del model
        gc.collect()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_wrong_value_is_refused() -> None:
    with (
        shoal.init() as world,
        pytest.raises(shoal.StepError, match=r"(?s)random='sample'.*one of 'samples', 'ranks'"),
    ):
        shoal.parallelize(nn.Linear(1, 1), world, random="sample")


class Sparing(nn.Module):
    """Draws less often in eval mode, so that the same number is another draw."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.rand(len(x), 1)
        return x * torch.rand(x.shape[1]) + torch.rand(x.shape)


def test_draws_in_eval_mode_show_nothing_about_those_of_training() -> None:
    model = Sparing()
    register(model)

    def run(first: int, samples: int) -> Tensor:
        x = torch.ones(samples, 7)
        found: Tensor = keyed(lambda: model(x), MicroBatch(None, first, samples, 1.0))
        return found

    model.eval()
    run(0, 4)
    model.train()
    whole = run(0, 4)
    assert torch.equal(torch.cat([run(0, 2), run(2, 2)]), whole)
